#!/usr/bin/env python3
"""Draws tokens/s against the memory cap, for moeflux and llama.cpp, from the tables of bench/results/capped.md.

    python bench/plot_memory.py        # writes docs/speed_by_memory.svg

One panel for each table of decoding; speeds are on a logarithmic axis. Needs Python 3.11 and nothing else.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "capped.md"
FIGURE = ROOT / "docs" / "speed_by_memory.svg"

WIDTH, HEIGHT = 760, 330
PANEL_TOP, PANEL_BOTTOM = 74, 268
LEAST, MOST = 0.2, 20.0
ENGINES = {"moeflux": "#2f6fb3", "llama.cpp": "#b3622f"}


@dataclass
class Panel:
    """Tokens/s of each engine by cap in GiB."""

    title: str
    speeds: dict[str, list[tuple[float, float]]]


def panels(text: str) -> list[Panel]:
    """Every table below a heading that begins with "Decode" and has a column "cap"."""
    found = []
    for section in re.split(r"^## ", text, flags=re.M):
        title, _, body = section.partition("\n")
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("|")]
        if not title.startswith("Decode") or not rows or rows[0][0] != "cap":
            continue
        speeds = {
            engine: [(float(row[0].removesuffix(" GiB")), float(row[rows[0].index(engine)])) for row in rows[2:]]
            for engine in ENGINES
        }
        found.append(Panel(re.sub(r" \(.*?\)", "", title.removeprefix("Decode, ")), speeds))
    if not found:
        raise SystemExit(f"{RESULTS}: expected tables of decoding by cap, found none")
    return found


def height(speed: float) -> float:
    share = math.log(speed / LEAST) / math.log(MOST / LEAST)
    return PANEL_BOTTOM - share * (PANEL_BOTTOM - PANEL_TOP)


def draw_panel(panel: Panel, left: float, right: float) -> list[str]:
    """The axes, lines and labels of one panel."""
    caps = sorted({cap for points in panel.speeds.values() for cap, _ in points})
    step = (right - left) / len(caps)
    across = {cap: left + step * (i + 0.5) for i, cap in enumerate(caps)}
    out = [f'<text x="{left}" y="54" font-size="13" font-weight="600">{panel.title}</text>']
    for speed in (0.2, 0.5, 1, 2, 5, 10, 20):
        y = height(speed)
        out.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555" font-size="12">{speed:g}</text>')
    for cap, x in across.items():
        out.append(f'<text x="{x:.1f}" y="{PANEL_BOTTOM + 20}" text-anchor="middle" fill="#555" font-size="12">{cap:g} GiB</text>')
    for engine, points in panel.speeds.items():
        colour = ENGINES[engine]
        places = [(across[cap], height(speed), speed) for cap, speed in sorted(points)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for x, y, speed in places:
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            out.append(f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle" fill="{colour}" font-size="12">{speed:.3g}</text>')
    return out


def main() -> None:
    found = panels(RESULTS.read_text(encoding="utf-8"))
    each = WIDTH / len(found)
    body = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fafaf7"/>']
    body.append('<text x="16" y="26" fill="#555">generated tokens/s by the memory allowed, page cache included</text>')
    for i, (engine, colour) in enumerate(ENGINES.items()):
        x = WIDTH - 220 + 110 * i
        body.append(f'<circle cx="{x}" cy="22" r="5" fill="{colour}"/><text x="{x + 11}" y="26">{engine}</text>')
    for i, panel in enumerate(found):
        body += draw_panel(panel, each * i + 48, each * (i + 1) - 20)
    body.append(f'<text x="16" y="{HEIGHT - 14}" fill="#555" font-size="12">Qwen3-30B-A3B shape, 2 cores; from bench/results/capped.md</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="14">'
    FIGURE.write_text("\n".join([head, *("  " + line for line in body), "</svg>", ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
