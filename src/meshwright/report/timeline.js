"use strict";
// Draws a timeline (report/timeline.py) on a canvas: zoom, pan, pointer and keys, one rank or all ranks.
const meshwrightTimeline = (() => {
  const LEFT = 118, RIGHT = 10, MOST = 420, AXIS = 24, LABEL_ROOM = 13;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") made.textContent = value; else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  function seconds(value) {
    const [unit, factor] = value >= 1 ? ["s", 1] : value >= 1e-3 ? ["ms", 1e3] : ["us", 1e6];
    const number = value * factor;
    return `${number >= 1000 ? Math.round(number).toLocaleString("en") : Number(number.toPrecision(3))} ${unit}`;
  }

  function bytes(value) {
    const [unit, factor] = value >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
    return `${Number((value / factor).toPrecision(3))} ${unit}`;
  }

  // The index of the first span of a lane that ends after `tick`. Spans are sorted by start, and may overlap.
  function firstAfter(lane, tick) {
    if (!lane.until) {
      let latest = 0;
      lane.until = lane.starts.map((start, index) => (latest = Math.max(latest, start + lane.lengths[index])));
    }
    let low = 0, high = lane.until.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (lane.until[middle] <= tick) low = middle + 1; else high = middle;
    }
    return low;
  }

  function create(figure, data) {
    const whole = data.ticks, tickS = data.duration_s / data.ticks;
    const state = { from: 0, to: whole, view: 0, rank: null, rowHeight: 0, cursor: null, still: true };
    const words = {};
    for (const [key, text] of [["f", "forward"], ["b", "backward"], ["i", "gradients of inputs"],
      ["w", "gradients of parameters"], ["rest", "data, optimizer, the rest"], ["wait", "waiting"], ["comm", "communication"]]) {
      words[key] = text;
    }

    const button = (label, name, act) => {
      const made = element("button", { type: "button", "aria-label": name, title: name, text: label });
      made.addEventListener("click", act);
      return made;
    };
    const tools = element("div", { class: "tools", role: "group", "aria-label": "timeline tools" });
    const views = element("select", { "aria-label": "rows" });
    data.views.forEach((view, index) => views.append(element("option", { value: index, text: view.name })));
    const rank = element("input", { type: "number", min: 0, placeholder: "all", "aria-label": "only rank", class: "rank" });
    tools.append(
      element("label", {}, "rows ", views), element("label", {}, "only rank ", rank), element("span", { class: "gap" }),
      button("+", "zoom in", () => zoom(0.5)), button("\u2212", "zoom out", () => zoom(2)),
      button("\u2190", "earlier", () => pan(-0.25)), button("\u2192", "later", () => pan(0.25)),
      button("\u2195 +", "taller rows", () => taller(1.6)), button("\u2195 \u2212", "flatter rows", () => taller(1 / 1.6)),
      button("whole step", "whole step", reset));
    const canvas = element("canvas", { "aria-hidden": "true" });
    const spacer = element("div", { class: "spacer" }, canvas);
    const scroller = element("div", { class: "scroller", tabindex: "0", role: "application", "aria-label": data.label });
    scroller.append(spacer);
    const axis = element("canvas", { "aria-hidden": "true", class: "axis-line" });
    const status = element("p", { class: "status soft", role: "status" });
    const help = element("p", { class: "soft help",
      text: "Drag or use \u2190 \u2192 to go from span to span, \u2191 \u2193 to go from row to row, + and \u2212 to zoom, 0 for the whole step. Ctrl and the wheel zoom at the pointer." });
    help.id = `help-${Math.random().toString(36).slice(2)}`;
    scroller.setAttribute("aria-describedby", help.id);
    const table = element("details", { class: "as-table" }, element("summary", { text: "The spans of a rank as a table" }));
    figure.replaceChildren(tools, scroller, axis, status, help, table);
    figure.classList.add("ready");

    let rows = [], colors = {}, width = 0, height = 0, queued = false;

    function choose() {
      rows = data.views[state.view].rows;
      if (state.rank !== null) rows = rows.filter((row) => row.rank === state.rank);
      state.cursor = null;
      const natural = rows.length ? MOST / rows.length : MOST;
      const one = rows.some((row) => row.lanes.length > 1) ? 36 : 26;
      state.rowHeight = Math.min(one, Math.max(natural, 0.5));
      if (state.rank !== null) state.rowHeight = 44;
      status.textContent = nothing();
      tabulate();
      layout();
      scroller.scrollTop = 0;
    }

    function layout() {
      const style = getComputedStyle(figure);
      for (const name of ["ink", "soft", "rule", "inside", "f", "b", "w", "rest", "s3", "s4", "card"]) colors[name] = style.getPropertyValue(`--${name}`).trim();
      colors.i = colors.b; colors.comm = colors.s3; colors.wait = colors.s4;
      const full = Math.max(1, rows.length * state.rowHeight);
      height = Math.min(MOST, Math.ceil(full));
      scroller.style.height = `${height}px`;
      spacer.style.height = `${full}px`;
      width = scroller.clientWidth;
      const ratio = window.devicePixelRatio || 1;
      for (const [each, tall] of [[canvas, height], [axis, AXIS]]) {
        each.width = Math.round(width * ratio); each.height = Math.round(tall * ratio);
        each.style.width = `${width}px`; each.style.height = `${tall}px`;
        each.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      }
      redraw();
    }

    function redraw() {
      if (queued) return;
      queued = true;
      requestAnimationFrame(() => { queued = false; draw(); });
    }

    const scale = () => (width - LEFT - RIGHT) / (state.to - state.from);
    const toX = (tick) => LEFT + (tick - state.from) * scale();

    // The boxes [x, width, kind, span] of a lane in the window; spans narrower than a pixel become one box a pixel.
    function boxes(lane) {
      const made = [], perTick = scale(), count = lane.starts.length;
      let index = firstAfter(lane, state.from);
      while (index < count && lane.starts[index] < state.to) {
        const start = Math.max(lane.starts[index], state.from);
        const end = Math.min(lane.starts[index] + lane.lengths[index], state.to);
        const x = LEFT + (start - state.from) * perTick, wide = (end - start) * perTick;
        made.push([x, Math.max(wide, 0.6), lane.kinds[index], index]);
        const next = wide < 0.5 ? firstAfter(lane, start + 1 / perTick) : index + 1;
        index = Math.max(next, index + 1);
      }
      return made;
    }

    function draw() {
      const pen = canvas.getContext("2d"), top = scroller.scrollTop, tall = state.rowHeight;
      pen.clearRect(0, 0, width, height);
      const first = Math.max(0, Math.floor(top / tall)), last = Math.min(rows.length, Math.ceil((top + height) / tall));
      const step = Math.max(1, Math.floor(1 / tall)), known = new Map();
      const every = Math.max(1, Math.ceil(LABEL_ROOM / tall));
      for (let index = first - (first % step); index < last;) {
        const row = rows[index];
        let until = index + step;  // equal neighbours that are too flat to be told apart are one box
        if (tall < 4) while (until < last && rows[until].lanes[0] === row.lanes[0]) until += step;
        const y = index * tall - top, room = Math.max(0.7, (until - index) * tall - (tall >= 4 ? 2 : 0));
        const parts = row.lanes.map((lane) => data.lanes[lane].height);
        const total = parts.reduce((sum, part) => sum + part, 0);
        let above = y;
        row.lanes.forEach((number, place) => {
          if (!known.has(number)) known.set(number, boxes(data.lanes[number]));
          const share = room * parts[place] / total;
          paint(pen, known.get(number), number, above, Math.max(0.7, share - (place < parts.length - 1 && tall > 12 ? 1 : 0)));
          above += share;
        });
        index = until;
      }
      pen.fillStyle = colors.card;
      pen.fillRect(0, 0, LEFT - 4, height);
      pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.textAlign = "right"; pen.fillStyle = colors.soft;
      for (let index = Math.ceil(first / every) * every; index < last; index += every) {
        const y = index * tall - top + Math.min(tall, LABEL_ROOM * 2) / 2;
        if (y > 6 && y < height - 4) pen.fillText(short(rows[index].label), LEFT - 10, y);
      }
      outline(pen, top);
      drawAxis();
    }

    function short(label) { return label.length > 17 ? `${label.slice(0, 16)}\u2026` : label; }

    function paint(pen, found, number, y, tall) {
      const lane = data.lanes[number];
      let style = -1;
      for (const [x, wide, kind] of found) {
        if (kind !== style) { style = kind; pen.fillStyle = colors[data.kinds[kind]]; }
        pen.fillRect(x, y, wide > 3 ? wide - 0.6 : wide, tall);
      }
      if (tall < 12) return;
      pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.textAlign = "center"; pen.fillStyle = colors.inside;
      for (const [x, wide, , index] of found) {
        if (wide < 16) continue;
        const name = data.names[lane.names[index]], match = /^\d+[FBIW](\d+)/.exec(name), label = match ? match[1] : name;
        if (6.2 * label.length + 4 < wide) pen.fillText(label, x + wide / 2, y + tall / 2 + 0.5);
      }
    }

    function outline(pen, top) {
      const at = state.cursor;
      if (!at || !rows[at.row]) return;
      const lane = data.lanes[at.lane], x0 = Math.max(LEFT, toX(lane.starts[at.span]));
      const x1 = Math.min(width - RIGHT, toX(lane.starts[at.span] + lane.lengths[at.span]));
      pen.strokeStyle = colors.ink; pen.lineWidth = 2;
      pen.strokeRect(x0 - 1, at.row * state.rowHeight - top, Math.max(3, x1 - x0 + 2), Math.max(3, state.rowHeight - 1));
    }

    function drawAxis() {
      const pen = axis.getContext("2d"), span = (state.to - state.from) * tickS;
      pen.clearRect(0, 0, width, AXIS);
      pen.strokeStyle = colors.soft; pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(LEFT, 0.5); pen.lineTo(width - RIGHT, 0.5); pen.stroke();
      const rough = span / Math.max(2, (width - LEFT) / 150), power = 10 ** Math.floor(Math.log10(rough || 1));
      const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough) || 1;
      pen.font = "12px system-ui, sans-serif"; pen.fillStyle = colors.soft; pen.textBaseline = "top"; pen.textAlign = "center";
      for (let at = Math.ceil(state.from * tickS / step - 1e-9) * step; at <= state.to * tickS * (1 + 1e-9); at += step) {
        const x = Math.min(toX(at / tickS), width - 26);
        pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, 4); pen.stroke();
        pen.fillText(at < step / 1e6 ? "0" : seconds(at), x, 7);
      }
    }

    function window_(from, to) {
      const least = Math.max(whole / 1e6, 2), span = Math.min(whole, Math.max(least, to - from));
      state.from = Math.min(Math.max(0, from), whole - span);
      state.to = state.from + span;
      redraw();
    }
    function zoom(factor, at = null) {
      const middle = at === null ? (state.cursor ? spanMiddle() : (state.from + state.to) / 2) : at;
      const inside = Math.min(Math.max(middle, state.from), state.to);
      window_(inside - (inside - state.from) * factor, inside + (state.to - inside) * factor);
    }
    function pan(part) { const by = part * (state.to - state.from); window_(state.from + by, state.to + by); }
    function reset() { state.from = 0; state.to = whole; choose(); }
    function taller(factor) {
      const middle = (scroller.scrollTop + height / 2) / state.rowHeight;
      state.rowHeight = Math.min(80, Math.max(MOST / Math.max(rows.length, 1) / 4, 0.25, state.rowHeight * factor));
      layout();
      scroller.scrollTop = middle * state.rowHeight - height / 2;
    }
    function spanMiddle() { const lane = data.lanes[state.cursor.lane]; return lane.starts[state.cursor.span] + lane.lengths[state.cursor.span] / 2; }

    function describe(at) {
      const lane = data.lanes[at.lane], start = lane.starts[at.span] * tickS, length = lane.lengths[at.span] * tickS;
      const moved = lane.bytes.length && lane.bytes[at.span] ? `, ${bytes(lane.bytes[at.span])}` : "";
      const kind = words[data.kinds[lane.kinds[at.span]]];
      return `${rows[at.row].label}: ${data.names[lane.names[at.span]]} (${kind}), ${seconds(length)}, from ${seconds(start)} to ${seconds(start + length)}${moved}`;
    }
    function nothing() { return rows.length ? "" : "no such rank here"; }
    function point(at) {
      state.cursor = at;
      status.textContent = at ? describe(at) : nothing();
      redraw();
    }

    // The span under a place of the canvas, or null.
    function under(x, y) {
      const index = Math.floor((y + scroller.scrollTop) / state.rowHeight), row = rows[index];
      if (!row || x < LEFT) return null;
      const tick = state.from + (x - LEFT) / scale(), slack = 1.5 / scale();
      const parts = row.lanes.map((lane) => data.lanes[lane].height), total = parts.reduce((sum, part) => sum + part, 0);
      let left = ((y + scroller.scrollTop) / state.rowHeight - index) * total, place = 0;
      while (place < parts.length - 1 && left > parts[place]) { left -= parts[place]; place += 1; }
      const lane = data.lanes[row.lanes[place]], span = firstAfter(lane, tick - slack);
      return span < lane.starts.length && lane.starts[span] <= tick + slack ? { row: index, lane: row.lanes[place], span } : null;
    }

    let drag = null;
    canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: state.from, to: state.to }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { drag = null; });
    canvas.addEventListener("pointercancel", () => { drag = null; });
    canvas.addEventListener("pointermove", (event) => {
      if (drag) { const by = (drag.x - event.clientX) / scale(); window_(drag.from + by, drag.to + by); return; }
      const box = canvas.getBoundingClientRect();
      point(under(event.clientX - box.left, event.clientY - box.top));
    });
    canvas.addEventListener("pointerleave", () => { if (document.activeElement !== scroller) point(null); });
    scroller.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        const x = event.clientX - canvas.getBoundingClientRect().left;
        zoom(event.deltaY > 0 ? 1.25 : 0.8, state.from + Math.max(0, x - LEFT) / scale());
      } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        pan((event.deltaX || event.deltaY) / 1500);
      }
    }, { passive: false });
    scroller.addEventListener("scroll", redraw);

    function step(by) {
      if (!state.cursor) { start(); return; }
      const { row, lane, span } = state.cursor, next = Math.min(Math.max(0, span + by), data.lanes[lane].starts.length - 1);
      point({ row, lane, span: next });
      show();
    }
    function start() {
      const index = Math.min(rows.length - 1, Math.floor(scroller.scrollTop / state.rowHeight)), row = rows[Math.max(0, index)];
      if (row && row.lanes.length) point({ row: Math.max(0, index), lane: row.lanes[0], span: Math.min(firstAfter(data.lanes[row.lanes[0]], state.from), data.lanes[row.lanes[0]].starts.length - 1) });
    }
    function otherRow(by) {
      if (!state.cursor) { start(); return; }
      const row = Math.min(Math.max(0, state.cursor.row + by), rows.length - 1), lane = rows[row].lanes[0];
      if (lane === undefined) return;
      point({ row, lane, span: Math.min(firstAfter(data.lanes[lane], spanMiddle()), data.lanes[lane].starts.length - 1) });
      show();
    }
    function show() {  // brings the span at the cursor into the window
      const y = state.cursor.row * state.rowHeight;
      if (y < scroller.scrollTop) scroller.scrollTop = y;
      if (y + state.rowHeight > scroller.scrollTop + height) scroller.scrollTop = y + state.rowHeight - height;
      const middle = spanMiddle(), half = (state.to - state.from) / 2;
      if (middle < state.from || middle > state.to) window_(middle - half, middle + half);
    }
    const keys = { ArrowRight: () => step(1), ArrowLeft: () => step(-1), ArrowDown: () => otherRow(1), ArrowUp: () => otherRow(-1),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: reset,
      PageUp: () => pan(-0.5), PageDown: () => pan(0.5), Home: () => window_(0, state.to - state.from), End: () => window_(whole, whole + state.to - state.from) };
    scroller.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });

    function tabulate() {
      for (const old of table.querySelectorAll("div")) old.remove();
      if (!table.open || !rows.length) return;
      const row = rows[state.cursor ? state.cursor.row : 0], body = element("tbody");
      for (const number of row.lanes) {
        const lane = data.lanes[number];
        for (let index = 0; index < lane.starts.length && body.children.length < 500; index += 1) {
          const cells = [data.names[lane.names[index]], lane.stream, seconds(lane.starts[index] * tickS), seconds(lane.lengths[index] * tickS)];
          body.append(element("tr", {}, ...cells.map((text, place) => element("td", place > 1 ? { text, class: "number" } : { text }))));
        }
      }
      const head = element("tr", {}, ...["span", "stream", "begins", "takes"].map((text, place) => element("th", place > 1 ? { text, class: "number", scope: "col" } : { text, scope: "col" })));
      const caption = element("caption", { text: `${row.label}: the first ${body.children.length} spans` });
      table.append(element("div", { class: "wide rows", tabindex: "0", role: "region", "aria-label": `spans of ${row.label}` }, element("table", {}, caption, element("thead", {}, head), body)));
    }
    table.addEventListener("toggle", tabulate);

    views.addEventListener("change", () => { state.view = Number(views.value); choose(); });
    rank.addEventListener("input", () => { state.rank = rank.value === "" ? null : Number(rank.value); choose(); });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", layout);
    new ResizeObserver(() => { if (scroller.clientWidth !== width) layout(); }).observe(scroller);
    choose();
    return { state, zoom, pan, reset, rows: () => rows };
  }

  // Draws what a server tells at `source`; an error stands in place of the timeline.
  create.load = async (figure, source, signal) => {
    const answer = await fetch(source, { signal });
    const problem = answer.ok ? "" : await answer.text();
    if (problem) { figure.replaceChildren(element("p", { class: "problem", role: "alert", text: problem })); return null; }
    return create(figure, await answer.json());
  };
  return create;
})();

for (const figure of document.querySelectorAll("figure.timeline")) {
  const data = figure.querySelector('script[type="application/json"]');
  if (data) meshwrightTimeline(figure, JSON.parse(data.textContent));
  else if (figure.dataset.source) meshwrightTimeline.load(figure, figure.dataset.source);
}
