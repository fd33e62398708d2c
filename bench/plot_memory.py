"""Draws tokens/s against the memory cap, for moeflux and llama.cpp.

bench/figures.py calls this with tables of bench/results/capped.json and writes docs/speed_by_memory.svg. One panel per table;
speeds are on a logarithmic axis. Needs Python 3.11 and nothing else.
"""

import math
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 330
PANEL_TOP, PANEL_BOTTOM = 74, 268
LEAST, MOST = 0.2, 20.0
ENGINES = {"moeflux": "#2f6fb3", "llama.cpp": "#b3622f"}
KEYS = {"moeflux": "moeflux", "llama.cpp": "llama_cpp"}


@dataclass
class Panel:
    """Tokens/s of each engine by cap in GiB."""

    title: str
    speeds: dict[str, list[tuple[float, float]]]


def panel(title: str, table: dict) -> Panel:
    speeds = {engine: [(row["cap"], row[key]) for row in table["rows"]] for engine, key in KEYS.items()}
    return Panel(title, speeds)


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


def figure(tables: dict[str, dict]) -> str:
    """The SVG with a panel for each table, by title."""
    found = [panel(title, table) for title, table in tables.items()]
    each = WIDTH / len(found)
    body = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fafaf7"/>']
    body.append('<text x="16" y="26" fill="#555">decode tokens/s by memory cap, page cache included</text>')
    for i, (engine, colour) in enumerate(ENGINES.items()):
        x = WIDTH - 220 + 110 * i
        body.append(f'<circle cx="{x}" cy="22" r="5" fill="{colour}"/><text x="{x + 11}" y="26">{engine}</text>')
    for i, shown in enumerate(found):
        body += draw_panel(shown, each * i + 48, each * (i + 1) - 20)
    body.append(f'<text x="16" y="{HEIGHT - 14}" fill="#555" font-size="12">Qwen3-30B-A3B shape, 2 cores; from bench/results/capped.json</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="14">'
    return "\n".join([head, *("  " + line for line in body), "</svg>", ""])
