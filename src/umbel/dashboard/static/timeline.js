// The timeline: lanes of workers on a canvas, by wall time or in logical order.
"use strict";
(() => {
  const canvas = document.getElementById("timeline");
  if (!canvas) return;
  const base = document.body.dataset.base;
  const wrap = canvas.parentElement;
  const tip = document.getElementById("tip");
  const pen = canvas.getContext("2d", { alpha: false });
  const LABEL = () => (wrap.clientWidth < 640 ? 84 : 168);
  const AXIS = 26;
  const GAP = 2;
  const PAD = 7;
  const ROWS_MAX = 24;
  const BARS_MAX = 20000;
  const ARROWS_MAX = 120;

  const bars = new Map(); // number -> bar
  const byTask = new Map(); // task id -> bars
  let alive = new Set();
  let version = 0;
  let mode = "wall";
  let follow = true;
  let showArrows = true;
  let offset = 0; // of our clock to the server's
  let view = null; // [from, to] on the axis of the mode
  let lanes = [];
  let BAR = 8; // thicker where there is room
  let placed = []; // bars with a place, sorted by their beginning
  let height = 0;
  let hovered = null;
  let dirty = true;
  let frames = 0;
  let colours = {};

  const OUTCOMES = { SUCCESS: "good", FAILURE: "bad", RETRY: "again", REVOKED: "gone", REJECTED: "gone", CANCELLED: "gone" };

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ground", "sheet", "ink", "soft", "line", "good", "bad", "again", "gone", "none", "blue", "lane", "faint"]) {
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    dirty = true;
  }

  // -- data ---------------------------------------------------------------------------------

  let fetching = false;
  async function load() {
    if (fetching) return;
    fetching = true;
    try {
      const answer = await fetch(`${base}/api/v1/timeline?after=${version}&bars=${BARS_MAX}`);
      if (!answer.ok) return;
      const told = await answer.json();
      if (told.after === 0 && version > 0) {
        bars.clear(); // the dashboard was started anew
        byTask.clear();
      }
      version = told.version;
      alive = new Set(told.alive);
      offset = told.now - Date.now() / 1000;
      if (told.bars.length) take(told.bars);
      if (!view) fit();
      document.getElementById("bars-known").textContent = bars.size.toLocaleString("en");
      canvas.dataset.bars = bars.size;
    } finally {
      fetching = false;
    }
  }

  function take(fresh) {
    for (const bar of fresh) {
      bars.delete(bar.n);
      bars.set(bar.n, bar);
    }
    while (bars.size > BARS_MAX) bars.delete(bars.keys().next().value);
    byTask.clear();
    for (const bar of [...bars.values()].sort((a, b) => a.n - b.n)) {
      if (!byTask.has(bar.id)) byTask.set(bar.id, []);
      byTask.get(bar.id).push(bar);
    }
    layout();
  }

  const now = () => Date.now() / 1000 + offset;
  // It runs, as far as is known: its worker is there, and no later attempt was heard of.
  function runs(bar) {
    if (bar.outcome || bar.started == null || !alive.has(bar.worker)) return false;
    const all = byTask.get(bar.id);
    return all[all.length - 1] === bar;
  }
  function begin(bar) {
    // What never ran is a mark where it ended; what waits is one where it was received.
    if (mode === "wall") return bar.started ?? bar.ended ?? bar.received;
    return bar.clocks[1] ?? bar.clocks[2] ?? bar.clocks[0];
  }
  function end(bar) {
    if (mode === "wall") return bar.ended ?? (runs(bar) ? now() : bar.started ?? bar.received);
    return bar.clocks[2] ?? bar.clocks[1] ?? bar.clocks[0];
  }
  function waited(bar) {
    return mode === "wall" ? bar.received : bar.clocks[0];
  }

  function layout() {
    const byWorker = new Map();
    for (const bar of bars.values()) {
      if (begin(bar) == null) continue;
      if (!byWorker.has(bar.worker)) byWorker.set(bar.worker, []);
      byWorker.get(bar.worker).push(bar);
    }
    lanes = [];
    placed = [];
    for (const name of [...byWorker.keys()].sort()) {
      const own = byWorker.get(name).sort((a, b) => begin(a) - begin(b));
      const ends = [];
      for (const bar of own) {
        const from = begin(bar);
        let row = ends.findIndex((until) => until <= from);
        if (row < 0) row = ends.length < ROWS_MAX ? ends.length : ends.indexOf(Math.min(...ends));
        ends[row] = Math.max(end(bar), from);
        bar.row = row;
      }
      lanes.push({ name, own, rows: ends.length, count: own.length });
      for (const bar of own) placed.push(bar);
    }
    const rows = lanes.reduce((sum, lane) => sum + lane.rows, 0);
    BAR = rows <= 24 ? 14 : rows <= 60 ? 10 : 7;
    let y = AXIS;
    for (const lane of lanes) {
      lane.y = y;
      lane.size = Math.max(lane.rows * (BAR + GAP) - GAP + 2 * PAD, 26);
      for (const bar of lane.own) bar.y = y + PAD + bar.row * (BAR + GAP);
      y += lane.size;
    }
    placed.sort((a, b) => begin(a) - begin(b));
    height = Math.max(y + 1, 220);
    resize();
    dirty = true;
  }

  // -- the view -----------------------------------------------------------------------------

  function extent() {
    let low = Infinity;
    let high = -Infinity;
    for (const bar of placed) {
      low = Math.min(low, begin(bar));
      high = Math.max(high, end(bar));
    }
    return low <= high ? [low, high] : mode === "wall" ? [now() - 60, now()] : [0, 100];
  }
  function fit() {
    const [low, high] = extent();
    const room = Math.max((high - low) * 0.02, mode === "wall" ? 0.05 : 1);
    view = [low - room, high + room];
    dirty = true;
  }
  function clampView() {
    const least = mode === "wall" ? 0.002 : 4;
    const span = Math.max(view[1] - view[0], least);
    const middle = (view[0] + view[1]) / 2;
    const [low, high] = extent();
    const most = Math.max((high - low) * 4, least * 10);
    const kept = Math.min(span, most);
    const centre = Math.min(Math.max(middle, low - kept * 0.45), high + kept * 0.45);
    view = [centre - kept / 2, centre + kept / 2];
    dirty = true;
  }
  function zoom(factor, at = 0.5) {
    setFollow(false);
    const span = view[1] - view[0];
    const pivot = view[0] + span * at;
    view = [pivot - span * factor * at, pivot + span * factor * (1 - at)];
    clampView();
  }
  function pan(share) {
    setFollow(false);
    const span = view[1] - view[0];
    view = [view[0] + span * share, view[1] + span * share];
    clampView();
  }
  function setFollow(wanted) {
    follow = wanted;
    const button = document.getElementById("follow");
    button.setAttribute("aria-pressed", String(wanted));
  }

  const x = (value) => LABEL() + ((value - view[0]) / (view[1] - view[0])) * (wrap.clientWidth - LABEL());
  const valueAt = (px) => view[0] + ((px - LABEL()) / (wrap.clientWidth - LABEL())) * (view[1] - view[0]);

  // -- drawing ------------------------------------------------------------------------------

  function resize() {
    const ratio = devicePixelRatio || 1;
    const width = wrap.clientWidth;
    const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.height = `${height}px`;
    }
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    dirty = true;
  }

  const STEPS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  function ticks() {
    const span = view[1] - view[0];
    const wanted = Math.max(2, (wrap.clientWidth - LABEL()) / 110);
    let step;
    if (mode === "wall") step = STEPS.find((one) => span / one <= wanted) || 86400;
    else {
      const rough = span / wanted;
      const power = 10 ** Math.floor(Math.log10(rough));
      step = Math.max(1, [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough));
    }
    const found = [];
    for (let at = Math.ceil(view[0] / step) * step; at <= view[1]; at += step) found.push(at);
    return [found, step];
  }
  function tickText(at, step) {
    if (mode !== "wall") return Math.round(at).toLocaleString("en");
    const iso = new Date(at * 1000).toISOString();
    return step >= 60 ? iso.slice(11, 16) : step >= 1 ? iso.slice(11, 19) : iso.slice(14, 23);
  }

  function draw() {
    frames += 1;
    canvas.dataset.frames = frames;
    const width = wrap.clientWidth;
    const label = LABEL();
    pen.fillStyle = colours.sheet;
    pen.fillRect(0, 0, width, height);
    lanes.forEach((lane, at) => {
      if (at % 2 === 0) {
        pen.fillStyle = colours.lane;
        pen.fillRect(0, lane.y, width, lane.size);
      }
    });
    const [marks, step] = ticks();
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    for (const at of marks) {
      const px = Math.round(x(at)) + 0.5;
      if (px < label) continue;
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(px, AXIS - 4);
      pen.lineTo(px, height);
      pen.stroke();
      const text = tickText(at, step);
      const half = pen.measureText(text).width / 2 + 3;
      pen.fillStyle = colours.soft;
      if (px - half > label && px + half < width) pen.fillText(text, px, AXIS / 2);
    }
    pen.save();
    pen.beginPath();
    pen.rect(label, AXIS, width - label, height - AXIS);
    pen.clip();
    const drawn = drawBars(width);
    if (mode === "wall") drawNow();
    if (showArrows) drawArrows(drawn);
    if (hovered) drawHovered();
    pen.restore();
    drawLabels(label);
  }

  function drawBars(width) {
    const label = LABEL();
    const scale = (width - label) / (view[1] - view[0]);
    const groups = new Map();
    const waits = [];
    const drawn = [];
    for (const bar of placed) {
      const from = begin(bar);
      if (from > view[1]) break;
      const until = end(bar);
      const since = waited(bar);
      if (until < view[0]) continue;
      const left = label + (from - view[0]) * scale;
      const size = Math.max((until - from) * scale, 1.5);
      const kind = bar.outcome ? OUTCOMES[bar.outcome] || "none" : runs(bar) ? "blue" : "none";
      if (!groups.has(kind)) groups.set(kind, []);
      groups.get(kind).push(left, bar.y, size);
      drawn.push(bar);
      if (since != null && from - since > 0 && (from - since) * scale > 2) {
        waits.push(label + (since - view[0]) * scale, bar.y + BAR / 2, left);
      }
    }
    pen.strokeStyle = colours.none;
    pen.globalAlpha = 0.35;
    pen.lineWidth = 1;
    if (drawn.length < 1500) {
      pen.beginPath();
      for (let at = 0; at < waits.length; at += 3) {
        pen.moveTo(waits[at], waits[at + 1]);
        pen.lineTo(waits[at + 2], waits[at + 1]);
      }
      pen.stroke();
    }
    pen.globalAlpha = 1;
    for (const [kind, flat] of groups) {
      pen.fillStyle = colours[kind];
      for (let at = 0; at < flat.length; at += 3) {
        pen.fillRect(flat[at], flat[at + 1], flat[at + 2] > 3 ? flat[at + 2] - 0.6 : flat[at + 2], BAR);
      }
    }
    canvas.dataset.drawn = drawn.length;
    return drawn;
  }

  function drawNow() {
    const px = x(now());
    pen.strokeStyle = colours.blue;
    pen.globalAlpha = 0.6;
    pen.beginPath();
    pen.moveTo(px, AXIS);
    pen.lineTo(px, height);
    pen.stroke();
    pen.globalAlpha = 1;
  }

  function arrow(fromX, fromY, toX, toY) {
    const bend = Math.max(12, Math.abs(toX - fromX) * 0.35);
    pen.moveTo(fromX, fromY);
    pen.bezierCurveTo(fromX + bend, fromY, toX - bend, toY, toX, toY);
    pen.moveTo(toX - 4, toY - 2.5);
    pen.lineTo(toX, toY);
    pen.lineTo(toX - 4, toY + 2.5);
  }
  // Where a parent was when it sent a child: at the sending, if that was heard, else at its start.
  function sentFrom(parent, child) {
    const sent = mode === "wall" ? child.sent : child.sent_clock;
    const from = begin(parent);
    const until = end(parent);
    return sent == null ? from : Math.min(Math.max(sent, from), Math.max(until, from));
  }
  function drawArrows(drawn) {
    const caused = [];
    for (const bar of drawn) {
      const parents = bar.parent ? byTask.get(bar.parent) : null;
      if (parents && parents[0] !== bar) caused.push([parents[parents.length - 1], bar]);
    }
    canvas.dataset.arrows = caused.length;
    if (caused.length > ARROWS_MAX) return; // nobody could follow them: rest on a bar instead
    pen.strokeStyle = colours.ink;
    pen.globalAlpha = 0.3;
    pen.lineWidth = 1;
    pen.beginPath();
    for (const [parent, bar] of caused) {
      arrow(x(sentFrom(parent, bar)), parent.y + BAR / 2, x(waited(bar) ?? begin(bar)), bar.y + BAR / 2);
    }
    pen.stroke();
    pen.globalAlpha = 1;
  }

  function drawHovered() {
    const bar = hovered;
    pen.strokeStyle = colours.ink;
    pen.lineWidth = 1.5;
    const left = x(begin(bar));
    pen.strokeRect(left - 1, bar.y - 1, Math.max(x(end(bar)) - left, 2) + 2, BAR + 2);
    pen.beginPath();
    const sent = mode === "wall" ? bar.sent : bar.sent_clock;
    const got = waited(bar);
    if (sent != null && got != null) {
      // From the sending, above all lanes, to the receipt.
      arrow(x(sent), AXIS + 3, x(got), bar.y + BAR / 2);
    }
    for (const parent of (bar.parent && byTask.get(bar.parent)) || []) {
      arrow(x(sentFrom(parent, bar)), parent.y + BAR / 2, x(got ?? begin(bar)), bar.y + BAR / 2);
    }
    for (const child of placed) {
      if (child.parent === bar.id && child !== bar) {
        arrow(x(sentFrom(bar, child)), bar.y + BAR / 2, x(waited(child) ?? begin(child)), child.y + BAR / 2);
      }
    }
    pen.stroke();
  }

  function drawLabels(label) {
    pen.textAlign = "left";
    for (const lane of lanes) {
      pen.fillStyle = colours.line;
      pen.fillRect(0, lane.y + lane.size - 1, wrap.clientWidth, 1);
    }
    pen.fillStyle = colours.line;
    pen.fillRect(label - 1, 0, 1, height);
    for (const lane of lanes) {
      pen.save();
      pen.beginPath();
      pen.rect(0, lane.y, label - 8, lane.size);
      pen.clip();
      pen.fillStyle = colours.ink;
      pen.font = "12px system-ui, sans-serif";
      pen.fillText(lane.name, 10, lane.y + Math.min(lane.size / 2, 13));
      if (lane.size > 38) {
        pen.fillStyle = colours.soft;
        pen.font = "11px system-ui, sans-serif";
        pen.fillText(`${lane.count.toLocaleString("en")} runs`, 10, lane.y + 28);
      }
      pen.restore();
    }
  }

  function frame() {
    if (view && follow && placed.length) {
      const span = view[1] - view[0];
      const last = mode === "wall" ? now() : extent()[1];
      view = [last - span * 0.96, last + span * 0.04];
      dirty = true;
    }
    if (view && dirty && !document.hidden) {
      dirty = false;
      const began = performance.now();
      draw();
      canvas.dataset.took = (performance.now() - began).toFixed(2); // milliseconds
    }
    requestAnimationFrame(frame);
  }

  // -- the pointer --------------------------------------------------------------------------

  function barAt(px, py) {
    const lane = lanes.find((one) => py >= one.y && py < one.y + one.size);
    if (!lane || px < LABEL()) return null;
    const slack = ((view[1] - view[0]) / wrap.clientWidth) * 3;
    const at = valueAt(px);
    let best = null;
    for (const bar of placed) {
      if (begin(bar) > at + slack) break;
      if (bar.worker === lane.name && Math.abs(bar.y + BAR / 2 - py) <= BAR / 2 + 2 && end(bar) >= at - slack) best = bar;
    }
    return best;
  }
  function seconds(value) {
    if (value == null) return "–";
    return value < 1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
  }
  function tell(bar, px, py) {
    const lines = [
      ["b", bar.name || "(unknown)"],
      ["span", `${bar.outcome || (runs(bar) ? "RUNNING" : bar.started != null ? "NO END HEARD" : "RECEIVED")} on ${bar.worker}`],
      ["span", `ran ${seconds(bar.started != null && (bar.ended != null || runs(bar)) ? end0(bar) - bar.started : null)}, waited ${seconds(bar.received != null && bar.started != null ? bar.started - bar.received : null)}`],
      ["span", `clock ${bar.clocks.map((one) => one ?? "–").join(" → ")}`],
      ["code", bar.id],
    ];
    tip.replaceChildren(...lines.map(([tag, text]) => Object.assign(document.createElement(tag), { textContent: text })));
    tip.hidden = false;
    const room = wrap.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(4, Math.min(px + 14, room))}px`;
    tip.style.top = `${py + 18}px`;
  }
  const end0 = (bar) => bar.ended ?? now();

  const pointers = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!view) return;
    const before = pointers.get(event.pointerId);
    if (!before) {
      const found = barAt(event.offsetX, event.offsetY);
      if (found !== hovered) {
        hovered = found;
        dirty = true;
      }
      canvas.classList.toggle("pointing", !!found);
      if (found) tell(found, event.offsetX, event.offsetY);
      else tip.hidden = true;
      return;
    }
    const room = wrap.clientWidth - LABEL();
    if (pointers.size === 1) {
      const dx = event.offsetX - before[0];
      moved += Math.abs(dx);
      if (moved > 3) pan(-dx / room);
    } else if (pointers.size === 2) {
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const was = Math.max(20, Math.abs(before[0] - other[0]));
      const is = Math.max(20, Math.abs(event.offsetX - other[0]));
      moved += 10;
      zoom(was / is, ((before[0] + other[0]) / 2 - LABEL()) / room);
    }
    pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    tip.hidden = true;
  });
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (moved > 3) return;
    const found = view && barAt(event.offsetX, event.offsetY);
    if (found) location.href = `${base}/tasks/${encodeURIComponent(found.id)}`;
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => {
    hovered = null;
    tip.hidden = true;
    dirty = true;
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!view) return;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        pan((event.deltaX || event.deltaY) / 1200);
      } else if (event.ctrlKey || event.metaKey || height <= wrap.clientHeight + 2 || event.altKey) {
        event.preventDefault();
        zoom(Math.exp(event.deltaY / 500), (event.offsetX - LABEL()) / (wrap.clientWidth - LABEL()));
      }
    },
    { passive: false },
  );

  // -- buttons and keys ---------------------------------------------------------------------

  const click = (id, act) => document.getElementById(id).addEventListener("click", act);
  click("zoom-in", () => zoom(0.6));
  click("zoom-out", () => zoom(1.6));
  click("fit", () => {
    setFollow(false);
    fit();
  });
  click("follow", () => setFollow(!follow));
  click("arrows", (event) => {
    showArrows = !showArrows;
    event.currentTarget.setAttribute("aria-pressed", String(showArrows));
    dirty = true;
  });
  function setMode(wanted) {
    mode = wanted;
    for (const one of ["wall", "logical"]) {
      document.getElementById(`mode-${one}`).setAttribute("aria-pressed", String(one === mode));
    }
    canvas.dataset.mode = mode;
    layout();
    fit();
  }
  click("mode-wall", () => setMode("wall"));
  click("mode-logical", () => setMode("logical"));
  document.addEventListener("keydown", (event) => {
    if (event.target.nodeName === "INPUT" || event.ctrlKey || event.metaKey || !view) return;
    if (event.key === "ArrowLeft") pan(-0.15);
    else if (event.key === "ArrowRight") pan(0.15);
    else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") zoom(1.6);
    else if (event.key === "0") fit();
    else if (event.key === "m") setMode(mode === "wall" ? "logical" : "wall");
  });

  // -- life ---------------------------------------------------------------------------------

  let lastLoad = 0;
  document.addEventListener("umbel:tick", () => {
    if (performance.now() - lastLoad < 450) return;
    lastLoad = performance.now();
    load();
  });
  document.addEventListener("umbel:theme", readColours);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);
  new ResizeObserver(() => {
    resize();
    if (view) clampView();
  }).observe(wrap);
  readColours();
  canvas.dataset.mode = mode;
  load().then(() => requestAnimationFrame(frame));
  setInterval(load, 2000);
})();
