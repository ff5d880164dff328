"""How the page looks. Colours are named once, for the light and for the dark."""

from __future__ import annotations

from typing import Final

CSS: Final = """
:root {
  color-scheme: light dark;
  --ground: #f6f6f3; --sheet: #ffffff; --ink: #1c1f24; --soft: #656b76; --line: #e3e3de;
  --good: #2f9e77; --bad: #d0434f; --again: #e09f2d; --gone: #8a6fc0; --none: #8b919b;
  --blue: #3a78c9; --wash: #3a78c914;
  --c0: #3a78c9; --c1: #2f9e77; --c2: #8a6fc0; --c3: #1aa3b8; --c4: #94714c;
  --c5: #6b8f3c; --c6: #b85c9e; --c7: #8b919b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #131519; --sheet: #1b1e24; --ink: #e7e8ea; --soft: #9aa1ad; --line: #2c3038;
    --good: #45bf93; --bad: #f0707b; --again: #eab354; --gone: #a98fe0; --none: #7f8693;
    --blue: #6ba3ee; --wash: #6ba3ee1c;
    --c0: #6ba3ee; --c1: #45bf93; --c2: #a98fe0; --c3: #41c4d8; --c4: #bf9a73;
    --c5: #92b862; --c6: #d985c1; --c7: #7f8693;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main, header, footer { max-width: 1180px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 36px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 0 0 2px; }
h3 { font-size: 14px; margin: 18px 0 4px; font-weight: 600; }
p { margin: 4px 0 10px; }
.soft, .lead, footer { color: var(--soft); }
.lead { font-size: 13.5px; margin: 0 0 12px; max-width: 78ch; }
nav { position: sticky; top: 0; z-index: 1; background: var(--ground);
  border-bottom: 1px solid var(--line); }
nav ul { max-width: 1180px; margin: 0 auto; padding: 9px 24px; display: flex; flex-wrap: wrap;
  gap: 2px 18px; list-style: none; font-size: 13.5px; }
nav a { color: var(--soft); text-decoration: none; } nav a:hover { color: var(--ink); }
section { background: var(--sheet); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 22px 20px; margin: 18px 0; scroll-margin-top: 52px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(156px, 1fr)); gap: 12px;
  margin: 20px 0 4px; }
.tile { background: var(--sheet); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 16px 11px; }
.tile b { display: block; font-size: 25px; line-height: 1.2; font-weight: 620;
  letter-spacing: -0.01em; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 12.5px; display: block; }
.tile.alarm b { color: var(--bad); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 8px 28px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
svg text.name { fill: var(--ink); font-size: 12px; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--none); stroke-width: 1; opacity: .55; }
.lane { fill: var(--wash); }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line-a { stroke: var(--c3); } .line-b { stroke: var(--blue); } .line-c { stroke: var(--gone); }
.line-sent { stroke: var(--ink); stroke-width: 1.4; stroke-dasharray: 1 3; opacity: .8; }
.good { fill: var(--good); background: var(--good); }
.bad { fill: var(--bad); background: var(--bad); }
.again { fill: var(--again); background: var(--again); }
.gone { fill: var(--gone); background: var(--gone); }
.none { fill: var(--none); background: var(--none); }
.a { background: var(--c3); } .b { background: var(--blue); } .c { background: var(--gone); }
.sent { background: var(--ink); }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); }
.c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); }
.c6 { fill: var(--c6); background: var(--c6); } .c7 { fill: var(--c7); background: var(--c7); }
.heat { fill: var(--blue); }
.open { fill: none; stroke: var(--bad); stroke-width: 1; stroke-dasharray: 3 2; background: none;
  border: 1px dashed var(--bad); }
.mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 3 2; }
.legend { list-style: none; padding: 0; margin: 6px 0 4px; display: flex; flex-wrap: wrap;
  gap: 2px 18px; font-size: 12.5px; color: var(--soft); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.key.sent { height: 2px; vertical-align: middle; }
.scroll { overflow-x: auto; margin-top: 6px; }
.wide svg { min-width: 720px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 550; color: var(--soft); font-size: 12px; white-space: nowrap; }
th, td { padding: 5px 13px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.m { white-space: nowrap; }
td.w { overflow-wrap: anywhere; min-width: 14ch; }
td.id { font: 12.5px ui-monospace, SFMono-Regular, Menlo, monospace; overflow-wrap: anywhere; }
td.pic { min-width: 150px; width: 18%; padding-top: 8px; }
.range { stroke: var(--blue); stroke-width: 2; opacity: .45; } .dot { fill: var(--blue); }
.badge { display: inline-block; padding: 0 8px; border-radius: 9px; font-size: 12px;
  line-height: 18px; color: var(--sheet); white-space: nowrap; }
section > p.soft { font-size: 13px; margin: 8px 0 0; }
.fine { color: var(--good); font-size: 13.5px; margin: 6px 0 0; }
.fine::before { content: "✓ "; }
footer { padding: 6px 24px 40px; font-size: 12.5px; }
@media print { nav { display: none; } section { break-inside: avoid; } }
@media (max-width: 600px) { main, header, footer { padding-left: 12px; padding-right: 12px; }
  section { padding: 14px; } .two { grid-template-columns: 1fr; } }
"""
