"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const several = data.runs.length > 1;
  const HEIGHT = 254, TOP = 14, BOTTOM = 44, RIGHT = 22;
  const state = { x: "steps", log: false, smooth: 0, range: null, hidden: new Set() };

  // ------------------------------------------------------------------------------------------------- the series

  const unpack = (text) => new Float64Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const axes = data.axes.map(([steps, times]) => ({ steps: unpack(steps), times: unpack(times) }));
  const series = data.runs.flatMap((run, number) => run.series.map((each) => ({
    ...each, run, number, values: unpack(each.values), axis: axes[each.axis],
  })));
  const xs = (each) => each.axis[state.x];
  const shown = (metric) => series.filter((s) => s.metric === metric && !state.hidden.has(s.number) && xs(s).length);

  function nearest(list, x) {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(list[low] - x) <= Math.abs(list[high] - x) ? low : high;
  }

  function smoothed(values) {
    if (!state.smooth) return values;
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (!Number.isFinite(value)) return value;
      sum = sum * state.smooth + value;
      weight = weight * state.smooth + 1;
      return sum / weight;
    });
  }

  function epochAt(run, step) {
    const found = run.epochs.filter(([first]) => first <= step).pop();
    return found ? found[1] : null;
  }

  // ------------------------------------------------------------------------------------------------- numbers

  function duration(seconds) {
    if (Math.abs(seconds) < 60) return `${+seconds.toPrecision(3)} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
    return `${Math.floor(seconds / 3600)} h ${Math.round(seconds % 3600 / 60)} min`;
  }

  /** The labels of an axis: as many digits as its step needs, and one notation for all. */
  function label(value, step, largest) {
    if (!value) return "0";
    if (largest >= 1e6 || largest < 1e-3) {
      const digits = Math.floor(Math.log10(Math.abs(value)) + 1e-9) - Math.floor(Math.log10(step) + 1e-9);
      return value.toExponential(Math.min(Math.max(0, digits), 4)).replace("e+", "e");
    }
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  }

  function ticks(low, high, count, least = 0) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = Math.max(least, power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999));
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
    const largest = Math.max(...found.map(Math.abs));
    return found.map((value) => [value, label(value, step, largest)]);
  }

  function logTicks(low, high) {
    const first = Math.floor(low), last = Math.ceil(high);
    if (high - low < 1.2) {
      return ticks(10 ** low, 10 ** high, 4).filter(([value]) => value > 0).map(([v, text]) => [Math.log10(v), text]);
    }
    const every = Math.ceil((last - first) / 6), found = [];
    for (let at = Math.ceil(low); at <= high; at += every) found.push([at, label(10 ** at, 10 ** at, 10 ** at)]);
    return found;
  }

  function timeTicks(low, high, count) {
    const unit = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => high - low > 2 * size) || [1, "s"];
    return ticks(low / unit[0], high / unit[0], count).map(([at, text]) => [at * unit[0], `${text} ${unit[1]}`]);
  }

  // ------------------------------------------------------------------------------------------------- elements

  function el(name, attributes = {}, text = null, parent = null) {
    const isSvg = ["svg", "g", "line", "path", "text", "circle", "rect", "title", "clipPath"].includes(name);
    const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const colour = (each) => (several ? `${each.number % 8} d${Math.floor(each.number / 8) % 3}` : each.split === "" || each.split === "train" ? 0 : 1);
  const isThin = (each) => several && each.split === "train"
    && series.some((other) => other.metric === each.metric && other.split !== "train");
  const nameOf = (each) => [several ? each.run.name : "", each.split].filter(Boolean).join(" · ") || each.metric;

  // ------------------------------------------------------------------------------------------------- a chart

  class Chart {
    constructor(metric) {
      this.metric = metric;
      this.figure = el("figure", { "data-metric": metric.name }, null, $("charts"));
      this.caption = el("figcaption", {}, null, this.figure);
      this.svg = el("svg", { tabindex: 0, role: "img", "aria-describedby": "help" }, null, this.figure);
      this.tip = el("div", { class: "tip", hidden: "" }, null, this.figure);
      this.drag = null;
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerleave", () => { this.drag = null; point(null); });
      this.svg.addEventListener("pointerdown", (event) => { this.drag = this.place(event); this.move(event); });
      this.svg.addEventListener("pointerup", (event) => this.drop(event));
      this.svg.addEventListener("pointercancel", () => { this.drag = null; point(null); });
      this.svg.addEventListener("dblclick", () => zoom(null));
      this.svg.addEventListener("keydown", (event) => this.press(event));
      this.svg.addEventListener("blur", () => point(null));
    }

    draw() {
      this.series = shown(this.metric.name).map((each) => ({ ...each, xs: xs(each), drawn: smoothed(each.values) }));
      this.legend();
      this.svg.replaceChildren();
      this.svg.setAttribute("aria-label", this.describe());
      this.overlay = null;
      const [low, high] = state.range || whole();
      const values = extent(this.series.map((s) => s.values.filter((v, i) => visible(v) && s.xs[i] >= low && s.xs[i] <= high)));
      if (values[0] > values[1]) {
        el("text", { x: "50%", y: "50%", "text-anchor": "middle" }, "no points here", this.svg);
        return;
      }
      this.scale(low, high, ...values.map(state.log ? Math.log10 : Number));
      const clip = el("clipPath", { id: `clip-${charts.indexOf(this)}` }, null, this.svg);
      el("rect", { x: this.left - 3, y: TOP - 3, width: this.width + 6, height: this.height + 6 }, null, clip);
      const plot = el("g", { "clip-path": `url(#${clip.id})` }, null, this.svg);
      for (const each of this.series) this.curve(each, plot, low, high);
      this.overlay = el("g", {}, null, this.svg);
    }

    legend() {
      this.caption.replaceChildren(el("h3", {}, this.metric.title));
      const entries = several ? this.series.filter((s) => this.series.some((o) => o.split !== s.split)) : this.series;
      const seen = new Set();
      for (const each of entries) {
        if (!each.split || seen.has(each.split)) continue;
        seen.add(each.split);
        const key = el("span", { class: "key" }, null, this.caption);
        el("span", { class: `swatch ${several ? "c7" : `c${colour(each)}`}${isThin(each) ? " thin" : ""}` }, null, key);
        key.append(each.split);
      }
    }

    describe() {
      const parts = this.series.map((each) => {
        const [low, high] = extent([each.values.filter(Number.isFinite)]);
        const last = each.values.length - 1;
        return `${nameOf(each)}: ${each.values.length} points, lowest ${low}, highest ${high}, `
          + `${each.values[last]} at step ${each.axis.steps[last]}`;
      });
      return `Curve of ${this.metric.title}. ${parts.join("; ")}`;
    }

    scale(low, high, bottom, top) {
      const pad = (top - bottom) * 0.06 || Math.abs(top) * 0.1 || 1;
      const total = this.svg.clientWidth || 400;
      [bottom, top] = [bottom - pad, top + pad];
      const rows = state.log ? logTicks(bottom, top) : ticks(bottom, top, 5);
      this.left = Math.max(34, 16 + 6.6 * Math.max(...rows.map(([, text]) => text.length)));
      [this.width, this.height] = [total - this.left - RIGHT, HEIGHT - TOP - BOTTOM];
      if (high <= low) [low, high] = [low - 1, high + 1];
      this.toX = (value) => this.left + (value - low) / (high - low) * this.width;
      this.fromX = (at) => low + (at - this.left) / this.width * (high - low);
      this.toY = (value) => TOP + (top - (state.log ? Math.log10(value) : value)) / (top - bottom) * this.height;
      for (const [value, text] of rows) {
        const y = TOP + (top - value) / (top - bottom) * this.height;
        el("line", { class: "grid", x1: this.left, x2: this.left + this.width, y1: y, y2: y }, null, this.svg);
        el("text", { x: this.left - 8, y: y + 4, "text-anchor": "end" }, text, this.svg);
      }
      const floor = TOP + this.height, count = Math.max(2, Math.floor(this.width / 65));
      el("line", { class: "axis", x1: this.left, x2: this.left + this.width, y1: floor, y2: floor }, null, this.svg);
      const columns = state.x === "steps" ? ticks(low, high, count, 1) : timeTicks(low, high, count);
      for (const [value, text] of columns) {
        const x = this.toX(value);
        el("line", { class: "axis", x1: x, x2: x, y1: floor, y2: floor + 4 }, null, this.svg);
        el("text", { x, y: floor + 19, "text-anchor": "middle" }, text, this.svg);
      }
      const name = state.x === "steps" ? "optimizer step" : "time since the start";
      el("text", { class: "name", x: this.left + this.width / 2, y: floor + 36, "text-anchor": "middle" }, name, this.svg);
    }

    curve(each, plot, low, high) {
      const from = Math.max(0, nearest(each.xs, low) - 1), to = Math.min(each.xs.length - 1, nearest(each.xs, high) + 1);
      const path = (values) => {
        let text = "", pen = "M";
        for (let i = from; i <= to; i++) {
          if (!visible(values[i]) || !Number.isFinite(each.xs[i])) { pen = "M"; continue; }
          text += `${pen}${this.toX(each.xs[i]).toFixed(1)} ${this.toY(values[i]).toFixed(1)}`;
          if (pen === "M") text += "h0";  // A point between two gaps is a dot.
          pen = "L";
        }
        return text;
      };
      const name = `c${colour(each)}${isThin(each) ? " thin" : ""}`, key = [each.split, each.metric].filter(Boolean).join("/");
      if (state.smooth) el("path", { class: `${name} raw`, d: path(each.values) }, null, plot);
      el("path", { class: name, d: path(each.drawn), "data-key": key, "data-run": each.run.name }, null, plot);
      for (const step of state.x === "steps" ? each.run.resumed : []) {
        const x = this.toX(step), mark = { class: "resumed", x1: x, x2: x, y1: TOP, y2: TOP + this.height };
        el("title", {}, `${each.run.name}: resumed after step ${step}`, el("line", mark, null, plot));
      }
    }

    // ------------------------------------------------------------------------------------------------ pointing

    place(event) { return event.clientX - this.svg.getBoundingClientRect().left; }

    move(event) {
      if (!this.overlay) return;
      const at = this.place(event);
      point(this.fromX(at), this);
      if (this.drag !== null && Math.abs(at - this.drag) > 4) {
        el("rect", { class: "zone", x: Math.min(at, this.drag), y: TOP, width: Math.abs(at - this.drag), height: this.height }, null, this.overlay);
      }
    }

    drop(event) {
      const at = this.place(event), from = this.drag;
      this.drag = null;
      if (from !== null && Math.abs(at - from) > 8) zoom([this.fromX(Math.min(at, from)), this.fromX(Math.max(at, from))]);
    }

    /** Draw the cursor at the point that is nearest to x; the chart that is pointed at shows its values. */
    cursor(x, isHere) {
      this.tip.hidden = true;
      if (!this.overlay) return;
      this.overlay.replaceChildren();
      if (x === null || !this.series.length) return;
      const found = this.series.map((each) => ({ each, at: nearest(each.xs, x) }));
      const best = found.reduce((a, b) => (Math.abs(b.each.xs[b.at] - x) < Math.abs(a.each.xs[a.at] - x) ? b : a));
      this.at = best.each.xs[best.at];
      const px = this.toX(this.at);
      if (px < this.left - 1 || px > this.left + this.width + 1) return;
      el("line", { class: "cursor", x1: px, x2: px, y1: TOP, y2: TOP + this.height }, null, this.overlay);
      for (const { each, at } of found) {
        const near = { class: `point c${colour(each)}`, cx: this.toX(each.xs[at]), cy: this.toY(each.drawn[at]), r: 4 };
        if (visible(each.drawn[at])) el("circle", near, null, this.overlay);
      }
      if (isHere) this.tell(found, best, px);
    }

    tell(found, best, px) {
      const { steps, times } = best.each.axis, step = steps[best.at], epoch = epochAt(best.each.run, step);
      const head = [`step ${step.toLocaleString("en")}`, epoch === null ? "" : `epoch ${epoch}`,
        times.length && Number.isFinite(times[best.at]) ? duration(times[best.at]) : ""].filter(Boolean).join(" · ");
      this.tip.replaceChildren(el("div", { class: "head" }, head));
      const table = el("table", {}, null, this.tip);
      for (const { each, at } of found) {
        const row = el("tr", {}, null, table), name = el("td", {}, null, row);
        el("span", { class: `swatch c${colour(each)}${isThin(each) ? " thin" : ""}` }, null, name);
        const other = each.axis.steps[at] === step ? "" : ` (step ${each.axis.steps[at].toLocaleString("en")})`;
        name.append(nameOf(each) + other);
        el("td", { "data-value": "" }, String(each.values[at]), row);
      }
      this.tip.hidden = false;
      const width = this.tip.offsetWidth, room = this.figure.clientWidth;
      this.tip.style.left = `${Math.max(8, Math.min(room - width - 8, px > room / 2 ? px - width - 14 : px + 14))}px`;
      this.said = [head, ...found.map(({ each, at }) => `${nameOf(each)} ${each.values[at]}`)].join(", ");
    }

    press(event) {
      const list = this.series.length ? this.series.reduce((a, b) => (b.xs.length > a.xs.length ? b : a)).xs : [];
      const [low, high] = state.range || whole(), half = (high - low) / 2, last = list.length - 1;
      const at = this.at === undefined ? -1 : nearest(list, this.at), by = event.shiftKey ? 10 : 1;
      const to = { ArrowRight: Math.min(last, at + by), ArrowLeft: Math.max(0, at - by), Home: 0, End: last }[event.key];
      const centre = this.at === undefined ? low + half : this.at;
      if (to !== undefined && list.length) {
        point(list[to], this);
        $("said").textContent = this.said || "";
      } else if (event.key === "+" || event.key === "=") zoom([centre - half / 2, centre + half / 2]);
      else if (event.key === "-") zoom([centre - half * 2, centre + half * 2]);
      else if (event.key === "0" || event.key === "Escape") zoom(null);
      else if (event.key.toLowerCase() === "l" && !event.ctrlKey && !event.metaKey) $("log").click();
      else return;
      event.preventDefault();
    }
  }

  const visible = (value) => Number.isFinite(value) && (!state.log || value > 0);
  const extent = (lists) => lists.reduce((whole, list) => list.reduce(
    ([a, b], value) => [Math.min(a, value), Math.max(b, value)], whole), [Infinity, -Infinity]);
  const whole = () => extent(series.filter((s) => !state.hidden.has(s.number)).map((s) => xs(s).filter(Number.isFinite)));
  const charts = [];

  function point(x, chart = null) {
    for (const each of charts) each.cursor(x, each === chart);
  }

  function zoom(range) {
    const [low, high] = whole();
    const cut = range && [Math.max(low, range[0]), Math.min(high, range[1])];
    state.range = cut && cut[1] > cut[0] && (cut[0] > low || cut[1] < high) ? cut : null;
    $("reset").hidden = !state.range;
    draw();
  }

  function draw() {
    for (const each of charts) each.draw();
  }

  // ------------------------------------------------------------------------------------------------- controls

  function press(button, is) { button.setAttribute("aria-pressed", String(is)); }

  for (const [number, run] of several ? data.runs.entries() : []) {
    const button = el("button", { type: "button", "aria-pressed": "true" }, null, $("runs"));
    el("span", { class: `swatch c${number % 8} d${Math.floor(number / 8) % 3}` }, null, button);
    button.append(run.name);
    button.addEventListener("click", () => {
      if (!state.hidden.delete(number)) state.hidden.add(number);
      press(button, !state.hidden.has(number));
      zoom(state.range);
    });
  }
  const buttons = [...document.querySelectorAll("[data-x]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      state.x = button.dataset.x;
      buttons.forEach((each) => press(each, each === button));
      zoom(null);
    });
  }
  buttons.forEach((button) => { button.hidden = !axes.some((axis) => axis.times.length); });
  $("log").addEventListener("click", () => { state.log = !state.log; press($("log"), state.log); draw(); });
  $("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); draw(); });
  $("reset").addEventListener("click", () => zoom(null));
  $("theme").addEventListener("click", () => {
    const root = document.documentElement, isDark = matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme || (isDark ? "dark" : "light")) === "dark" ? "light" : "dark";
  });

  if (series.length) {
    charts.push(...data.metrics.map((metric) => new Chart(metric)));
    $("controls").hidden = $("help").hidden = false;
    let drawn = 0;
    new ResizeObserver(() => {
      if ($("charts").clientWidth !== drawn) { drawn = $("charts").clientWidth; draw(); }
    }).observe($("charts"));
  } else $("curves").hidden = true;
})();
