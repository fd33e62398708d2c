"""How unevenly the experts are chosen, as a Markdown table: popularity.py facts.json (train.py writes it).

The shares of a layer sum to 1. Gini: 0 if all experts are equally popular, 1 - 1/experts if one does everything.
Zipf: the exponent s of the least-squares line through log share = c - s · log rank.
"""

import json
import sys

import numpy as np


def gini(share: np.ndarray) -> float:
    """Gini coefficient of shares that sum to 1, largest first."""
    n = len(share)
    return float((n + 1 - 2 * (share * np.arange(1, n + 1)).sum()) / n)


def zipf(share: np.ndarray) -> float:
    """Exponent of the fitted power law, shares largest first."""
    return float(-np.polyfit(np.log(np.arange(1, len(share) + 1)), np.log(share), 1)[0])


def main() -> None:
    """Command line."""
    with open(sys.argv[1], encoding="utf-8") as f:
        layers = np.array(json.load(f)["expert_share_sorted_by_layer"])
    print("| layer | most used | top 4 | top 8 | least used | Gini | Zipf exponent |\n| --: | --: | --: | --: | --: | --: | --: |")
    rows = [(str(i), s) for i, s in enumerate(layers)] + [("mean", layers.mean(0))]
    for name, s in rows:
        s = s / s.sum()
        least = f"{100 * s[-1]:.1f} %"
        print(f"| {name} | {100 * s[0]:.1f} % | {100 * s[:4].sum():.1f} % | {100 * s[:8].sum():.1f} % | {least} | {gini(s):.2f} | {zipf(s):.2f} |")


if __name__ == "__main__":
    main()
