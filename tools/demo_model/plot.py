"""Draws the loss over all training runs: plot.py OUT.png LOG.csv [LOG.csv …], logs in the order of the runs."""

import csv
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    """Command line."""
    out, logs = sys.argv[1], sys.argv[2:]
    plt.figure(figsize=(7.5, 3.8), dpi=80)
    start, rounding = 0.0, None
    for n, log in enumerate(logs):
        with open(log, encoding="utf-8") as f:
            rows = [{k: float(v) if v else None for k, v in r.items()} for r in csv.DictReader(f)]
        for r in rows:
            r["tokens"] = start + r["tokens"] / 1e6
            if r["rounding"] and rounding is None:
                rounding = r["tokens"]
        val = [r for r in rows if r["validation"]]
        plt.plot([r["tokens"] for r in rows], [r["loss"] for r in rows], lw=0.8, color="tab:blue", label=None if n else "training")
        plt.plot([r["tokens"] for r in val], [r["validation"] for r in val], "o", ms=2.5, color="tab:orange", label=None if n else "fresh conversations")
        start = rows[-1]["tokens"]
        if n + 1 < len(logs):
            plt.axvline(start, color="lightgray", lw=0.8)
    if rounding is not None:
        plt.axvline(rounding, color="gray", ls=":", label="rounding to Q4_K/Q6_K begins")
    plt.yscale("log")
    plt.ylim(0.04, 1.0)
    plt.xlabel("million tokens")
    plt.ylabel("weighted loss (nats)")
    plt.legend()
    plt.tight_layout()
    plt.savefig(out)


if __name__ == "__main__":
    main()
