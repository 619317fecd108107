"""The style sheet of a report: light and dark, phone to paper. Fetches no font, image or script."""

from __future__ import annotations

from sgt_ds.report.html.palette import DARK, LIGHT

_THEME = """
  --page: {page}; --card: {card}; --text: {text}; --soft: {soft}; --rule: {rule}; --grid: {grid};
  --missing: {missing}; --depth: {depth};
  {series}
"""


def style_sheet() -> str:
    """The text of the page's one `style` element."""
    light = _theme(
        LIGHT,
        page="#f6f7f9",
        card="#ffffff",
        text="#1b1f24",
        soft="#57606a",
        rule="#d0d7de",
        grid="#e4e8ec",
        missing="#e9ecef",
        depth="#0072b2",
    )
    dark = _theme(
        DARK,
        page="#0f1216",
        card="#181c22",
        text="#e8eaed",
        soft="#a3adb8",
        rule="#38414b",
        grid="#2a313a",
        missing="#2a2f36",
        depth="#56b4e9",
    )
    strokes = "".join(f".s{index}{{stroke:var(--s{index})}}" for index in range(len(LIGHT)))
    depths = "".join(
        f".d{level}{{fill-opacity:{0.28 + 0.24 * (level - 1):.2f}}}" for level in range(1, 5)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"{strokes}\n{depths}\n{_RULES}"
    )


def _theme(series: tuple[str, ...], **colours: str) -> str:
    lines = " ".join(f"--s{index}: {colour};" for index, colour in enumerate(series))
    return _THEME.format(series=lines, **colours)


_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: .94rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main, header { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 36px 0 12px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: 1.05rem; margin: 20px 0 8px; overflow-wrap: anywhere; }
p, li { max-width: 80ch; overflow-wrap: anywhere; }
a { color: var(--s0); }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 10px 0 0; }
.note, .lead { color: var(--soft); margin: 4px 0 8px; }
.run-key { display: inline-block; width: 22px; height: 10px; margin-right: 6px; vertical-align: baseline; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 16px; align-items: start; }
.pair.runs { grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); }
.chart { margin: 0; padding: 14px 16px 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; min-width: 0; }
.column { min-width: 0; display: grid; gap: 16px; align-content: start; grid-template-columns: minmax(0, 1fr); }
figcaption { margin-bottom: 6px; }
figcaption span { color: var(--soft); font-size: .87rem; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: .82rem; margin-bottom: 6px; }
.legend > span { display: inline-flex; align-items: center; gap: 6px; overflow-wrap: anywhere; }
.legend > .scale { white-space: nowrap; }
.legend svg { width: 28px; height: 12px; flex: none; }
.legend svg.bar { width: 96px; height: 12px; }
.plot { display: grid; grid-template-columns: 3.6em minmax(0, 1fr); font-size: .78rem;
  font-variant-numeric: tabular-nums; color: var(--soft); }
.y-label { grid-column: 1 / 3; margin-bottom: 8px; }
.y-ticks, .x-ticks { position: relative; }
.area { position: relative; height: 260px; border-left: 1px solid var(--rule); border-bottom: 1px solid var(--rule); }
.rows-few .area { height: 200px; }
.rows-some .area { height: 300px; }
.rows-many .area { height: 460px; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.x-ticks { grid-column: 2; height: 1.6em; margin-top: 3px; }
.x-label { grid-column: 2; text-align: right; }
.tick { position: absolute; white-space: nowrap; }
.y-ticks .tick { right: 6px; transform: translateY(50%); line-height: 1; }
.x-ticks .tick { transform: translateX(-50%); }
.x-ticks .tick.first { transform: none; }
.x-ticks .tick.last { transform: translateX(-100%); }
.plot path, .plot line, .plot rect, .legend path, .legend rect { vector-effect: non-scaling-stroke; }
.grid line { stroke: var(--grid); stroke-width: 1; }
path.line, path.thin, path.dashed, path.dotted, path.points, path.wide { fill: none; stroke-linejoin: round; stroke-linecap: round; }
path.line { stroke-width: 2; }
path.thin { stroke-width: 1.4; }
path.wide { stroke-width: 5; opacity: .45; }
path.dashed { stroke-width: 2; stroke-dasharray: 7 5; stroke-linecap: butt; }
path.dotted { stroke-width: 2.4; stroke-dasharray: 0.1 6; }
path.points { stroke-width: 6.5; }
path.band { stroke: none; opacity: .22; }
path.cell { shape-rendering: crispEdges; }
.moment { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 3 3; fill: none; }
rect.missing { fill: var(--missing); stroke: none; }
path.halo { fill: none; stroke: #000; stroke-width: 4; }
path.outline { fill: none; stroke: #fff; stroke-width: 1.8; }
.legend path.outline { stroke: var(--text); }
rect.depth { fill: var(--depth); stroke: var(--depth); stroke-width: 1; }
path.rest { stroke: var(--rule); stroke-width: 1.5; fill: none; }
path.event { fill: none; stroke-linecap: round; }
path.activate { stroke: var(--s1); stroke-width: 9; }
path.deepen { stroke: var(--s2); stroke-width: 9; stroke-linecap: square; }
path.freeze { stroke: var(--text); stroke-width: 2.5; }
path.stall { stroke: var(--soft); stroke-width: 1.4; }
.tag { position: absolute; transform: translate(3px, 50%); padding: 0 4px; border-radius: 3px; line-height: 1.35;
  font-size: .74rem; background: #000c; color: #fff; pointer-events: none; white-space: nowrap; overflow: hidden; }
.in-bar { background: var(--card); color: var(--text); padding: 0 2px; transform: translate(1px, 50%); }
details { margin-top: 8px; font-size: .87rem; }
summary { cursor: pointer; color: var(--soft); }
.scroll { overflow-x: auto; max-height: 420px; overflow-y: auto; }
.scroll.wide { max-height: none; margin-bottom: 16px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
thead th { border-bottom-color: var(--rule); }
tbody th { font-weight: 400; color: var(--soft); }
pre { overflow-x: auto; font-size: .8rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: 6px; padding: 10px; }
ol.story { padding-left: 1.6em; }
ol.story.long { columns: 2 44ch; column-gap: 40px; }
ol.story li { margin-bottom: 4px; break-inside: avoid; }
footer { color: var(--soft); font-size: .82rem; margin: 36px 0 24px; }
@media (max-width: 560px) {
  main, header { padding: 0 12px; }
  header { padding-top: 16px; }
  .chart { padding: 10px 10px 8px; }
  .area { height: 220px; }
}
@media print {
  :root { font-size: 12px; }
  body { background: #fff; }
  svg * , .tag, .run-key { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .chart, tr, li { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  nav, details:not([open]) { display: none; }
  .scroll { overflow: visible; max-height: none; }
  .pair { grid-template-columns: 1fr 1fr; }
}
"""
