#!/usr/bin/env python3
"""Writes the measured tables of README.md and the documentation from the files in bench/results.

    python3 bench/figures.py            # rewrites tables and docs/speed_by_memory.svg
    python3 bench/figures.py --check    # fails if one of them differs, changing nothing

Every bench/results/*.json holds the machine, the model and, per table, the command, the columns and a row per case. A table
appears in a Markdown file between `<!-- figures: NAME -->` and `<!-- /figures -->`, where NAME is `FILE/TABLE` for a whole
table, `FILE.txt` for a program's output, or a name in VIEWS. Figures in running text are listed in CLAIMS. Needs Python
3.11 and nothing else.
"""

import argparse
import difflib
import json
import re
import sys
from pathlib import Path

sys.dont_write_bytecode = True
import plot_memory  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- /figures -->)", re.S)

# Tables of several files: label, and the row it shows as FILE/TABLE and the values that pick the row.
VIEWS = {
    "cpu": [
        ("3.5 GB, all in memory: prefill of 512 tokens", "llama_cpp_cpu/resident", {"case": "8 prefill"}),
        ("3.5 GB, all in memory: decode", "llama_cpp_cpu/resident", {"case": "8 decode"}),
        ("9.5 GB, all in memory: prefill of 512 tokens", "llama_cpp_cpu/resident", {"case": "24 prefill"}),
        ("9.5 GB, all in memory: decode", "llama_cpp_cpu/resident", {"case": "24 decode"}),
        ("9.5 GB, all in memory: decode after 4096 tokens", "llama_cpp_cpu/resident", {"case": "24 deep"}),
        ("18.6 GB in 4 GiB, uniform routing: decode", "capped/decode-uniform", {"cap": 4}),
        ("18.6 GB in 6 GiB, uniform routing: decode", "capped/decode-uniform", {"cap": 6}),
        ("18.6 GB in 10 GiB, uniform routing: decode", "capped/decode-uniform", {"cap": 10}),
        ("18.6 GB in 4 GiB, skewed routing: decode", "capped/decode-skewed", {"cap": 4}),
        ("18.6 GB in 6 GiB, skewed routing: decode", "capped/decode-skewed", {"cap": 6}),
        ("18.6 GB in 6 GiB, skewed routing: prefill of 512 tokens", "capped/prefill-skewed", {"cap": 6}),
        ("18.6 GB in 10 GiB, skewed routing: decode", "capped/decode-skewed", {"cap": 10}),
    ],
    "gpu": [
        ("all experts on the GPU: prefill of 512 tokens", "cuda/peer", {"case": "prefill 512"}),
        ("all experts on the GPU: prefill of 2048 tokens", "cuda/peer", {"case": "prefill 2048"}),
        ("all experts on the GPU: decode", "cuda/peer", {"case": "decode"}),
        ("all experts on the GPU: decode after 4096 tokens", "cuda/peer", {"case": "deep"}),
        ("half of the experts on the GPU (9.5 GiB in use): prefill of 512 tokens", "cuda/peer", {"case": "half prefill"}),
        ("half of the experts on the GPU (9.5 GiB in use): decode", "cuda/peer", {"case": "half decode"}),
    ],
}

# Columns of tables that show a part of a table in bench/results.
EXCERPTS = {
    "budget": (
        "capped/decode-skewed",
        [["memory", "{cap:g} GiB"], ["hits", "{hits:.1%}"], ["read per token", "{read_mb} MB"], ["tokens/s", "{moeflux:.2f}"]],
    ),
}

# Figures in running text: file, pattern whose groups are the figures, and for each group where it comes from.
CLAIMS = [
    ("README.md", r"Sapphire Rapids.*?prefill (\S+) tokens/s, (\S+) times.*?decode (\S+), (\S+) times", [
        ("llama_cpp_cpu/sapphire-rapids", {"case": "prefill"}, "{moeflux:.0f}"),
        ("llama_cpp_cpu/sapphire-rapids", {"case": "prefill"}, "{ratio}"),
        ("llama_cpp_cpu/sapphire-rapids", {"case": "decode"}, "{moeflux}"),
        ("llama_cpp_cpu/sapphire-rapids", {"case": "decode"}, "{ratio}"),
    ]),
    ("README.md", r"(\S+) to (\S+) times as fast as llama\.cpp.*?when the model does not fit", [
        ("capped/prefill-skewed", {"cap": 6}, "{ratio}"),
        ("capped/decode-skewed", {"cap": 6}, "{ratio}"),
    ]),
    ("README.md", r"bus alone gave (\S+) tokens/s", [("cuda/peer", {"case": "half decode"}, "{moeflux:.0f}")]),
    ("docs/decisions/streaming.md", r"reads (\S+) MB per token where the default reads (\S+)\n", [
        ("capped/policy", {"cap": 4}, "{lru_mb}"),
        ("capped/policy", {"cap": 4}, "{read_mb}"),
    ]),
]


class Wrong(Exception):
    """Something that a person has to correct."""


def table_of(name: str) -> dict:
    """The table FILE/TABLE, after checking what every table must have."""
    file, _, table = name.partition("/")
    content = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    for key in ("machine", "model"):
        if not content.get(key):
            raise Wrong(f"bench/results/{file}.json: expected a {key}, found none")
    if table not in content["tables"]:
        raise Wrong(f"bench/results/{file}.json: expected a table {table}, found {', '.join(content['tables'])}")
    found = content["tables"][table]
    if not found.get("command"):
        raise Wrong(f"{name}: expected a command, found none")
    for row in found["rows"]:
        # Ratios were rounded after dividing, so they may differ from the quotient of what is written by that rounding.
        if "ratio" in row and abs(row["ratio"] * row["llama_cpp"] / row["moeflux"] - 1) > 0.02:
            raise Wrong(f"{name}: a ratio of {row['ratio']} for {row['moeflux']} to {row['llama_cpp']}")
    return found


def row_of(name: str, pick: dict) -> dict:
    rows = [row for row in table_of(name)["rows"] if all(row.get(key) == value for key, value in pick.items())]
    if len(rows) != 1:
        raise Wrong(f"{name}: expected one row with {pick}, found {len(rows)}")
    return rows[0]


def markdown(columns: list[list[str]], rows: list[dict]) -> list[str]:
    """A table with the first column, and columns without figures, to the left."""
    cells = [[show.format(**row).replace("%", " %").replace("  %", " %") for _, show in columns] for row in rows]
    is_number = [all(re.match(r"[\d–]", line[i]) for line in cells) and i > 0 for i in range(len(columns))]
    head = "| " + " | ".join(name for name, _ in columns) + " |"
    rule = "| " + " | ".join("--:" if number else ":--" for number in is_number) + " |"
    return [head.replace("|  |", "| |"), rule, *("| " + " | ".join(line) + " |" for line in cells)]


def significant(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def compared(label: str, row: dict) -> dict:
    """A row of README.md: speeds in three digits, beside the ratio."""
    ratio = f"{row['ratio']:.2f}" if row["ratio"] < 2.5 else f"{row['ratio']:.1f}"
    return {"label": label, "peer": significant(row["llama_cpp"]), "own": significant(row["moeflux"]), "ratio": ratio}


def block(name: str) -> list[str]:
    """The lines between the markers of `name`."""
    if name in VIEWS:
        rows = [compared(label, row_of(table, pick)) for label, table, pick in VIEWS[name]]
        return markdown([["", "{label}"], ["llama.cpp", "{peer}"], ["moeflux", "{own}"], ["ratio", "{ratio}"]], rows)
    if name in EXCERPTS:
        table, columns = EXCERPTS[name]
        return markdown(columns, table_of(table)["rows"])
    if name.endswith(".txt"):
        return ["```", *(RESULTS / name).read_text(encoding="utf-8").splitlines(), "```"]
    table = table_of(name)
    return markdown(table["columns"], table["rows"])


def rendered(path: Path) -> str:
    """The text of a Markdown file with its tables as they should be."""
    text = path.read_text(encoding="utf-8")
    if text.count("<!-- figures:") != len(BLOCK.findall(text)):
        raise Wrong(f"{path}: a marker without its end")
    return BLOCK.sub(lambda found: found[1] + "\n".join(block(found[2])) + "\n" + found[4], text)


def check_claims() -> None:
    for file, pattern, sources in CLAIMS:
        found = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.S)
        if not found:
            raise Wrong(f"{file}: nothing like {pattern!r}; correct CLAIMS in bench/figures.py")
        for figure, (table, pick, show) in zip(found.groups(), sources, strict=True):
            expected = show.format(**row_of(table, pick))
            if figure != expected:
                raise Wrong(f"{file}: expected {expected} ({table}, {pick}), found {figure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if something differs")
    check = parser.parse_args().check
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(RESULTS.glob("*.md"))]
    wanted = {page: rendered(page) for page in pages}
    wanted[ROOT / "docs" / "speed_by_memory.svg"] = plot_memory.figure(
        {"skewed routing": table_of("capped/decode-skewed"), "uniform routing": table_of("capped/decode-uniform")}
    )
    differing = 0
    for path, text in wanted.items():
        present = path.read_text(encoding="utf-8") if path.exists() else ""
        if present == text:
            continue
        differing += 1
        if check:
            name = str(path.relative_to(ROOT))
            lines = difflib.unified_diff(present.splitlines(), text.splitlines(), name, "bench/results", lineterm="", n=0)
            print("\n".join(lines))
        else:
            path.write_text(text, encoding="utf-8")
    check_claims()
    if check and differing:
        raise Wrong(f"{differing} files differ from bench/results; run python3 bench/figures.py")


if __name__ == "__main__":
    try:
        main()
    except Wrong as error:
        sys.exit(f"error: {error}")
