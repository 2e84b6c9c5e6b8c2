"use strict";
// Live memory over a run: stacked areas on a canvas, drawn from every event at every zoom.

const MARGIN = { left: 58, right: 10, top: 30, bottom: 24 };
const { categories, runs } = JSON.parse(document.getElementById("data").textContent);
const NAMES = categories.map(([name]) => name);
let alongTime = false;

const inBytes = (n) => n >= 2 ** 30 ? (n / 2 ** 30).toFixed(2) + " GiB"
  : n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : n >= 1024 ? (n / 1024).toFixed(1) + " KiB" : n ? n + " B" : "0";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const title = (category) => categories[category][1];
const element = (tag, text, className, ...children) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  made.append(...children);
  return made;
};
const key = (background) => {
  const made = element("span", undefined, background ? "key" : "key dash");
  if (background) made.style.background = background;
  return made;
};

class Chart {
  constructor(run, place) {
    this.run = run;
    this.canvas = element("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "Live memory by category: " + run.summary);
    this.tip = element("div", undefined, "tip");
    this.tip.hidden = true;
    this.kept = element("div");
    place.replaceChildren(element("div", undefined, "plot", this.canvas, this.tip), this.kept);
    this.n = run.events.length;
    this.totals = new Float64Array(this.n);
    this.live = NAMES.map(() => new Float64Array(this.n));
    const now = NAMES.map(() => 0);
    for (let i = 0; i < this.n; i++) {
      const block = run.events[i] >= 0 ? run.events[i] : ~run.events[i];
      now[run.categories[block]] += run.events[i] >= 0 ? run.sizes[block] : -run.sizes[block];
      let total = 0;
      for (let c = 0; c < NAMES.length; c++) total += this.live[c][i] = now[c];
      this.totals[i] = total;
    }
    this.all();
    this.listen();
  }

  // --- where things are ----------------------------------------------------------------------------------------------

  scale() { return alongTime ? this.run.times : this.run.places; }
  place(i) { return i < 0 ? 0 : this.scale()[Math.min(i, this.n - 1)]; }
  limit() { return this.place(this.n - 1) || 1; }
  x(place) { return MARGIN.left + (place - this.from) / (this.to - this.from) * this.width; }
  y(bytes) { return MARGIN.top + this.height * (1 - bytes / this.top); }
  placeAt(x) { return this.from + (x - MARGIN.left) / this.width * (this.to - this.from); }

  // The last event at or before a place; -1 before the first.
  eventAt(place) {
    const scale = this.scale();
    let low = 0, high = this.n;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (scale[middle] <= place) low = middle + 1; else high = middle;
    }
    return low - 1;
  }

  highest() {
    const predicted = this.run.bands.map(([name]) => (this.run.predicted && this.run.predicted[name]) || 0);
    return this.totals.reduce((most, total) => Math.max(most, total), Math.max(0, ...predicted));
  }

  all() { this.from = 0; this.to = this.limit(); }

  show(from, to) {
    const most = this.limit(), least = alongTime ? most / 1e5 : 0.5;
    const size = Math.min(most, Math.max(least, to - from));
    this.from = Math.max(0, Math.min(most - size, (from + to - size) / 2));
    this.to = this.from + size;
    this.draw();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  draw() {
    const box = this.canvas.getBoundingClientRect(), scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(box.width * scale);
    this.canvas.height = Math.round(box.height * scale);
    this.width = box.width - MARGIN.left - MARGIN.right;
    this.height = box.height - MARGIN.top - MARGIN.bottom;
    const pen = this.pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, box.width, box.height);
    pen.font = "11px system-ui, sans-serif";
    this.drawAxes();
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, 0, this.width, box.height);
    pen.clip();
    this.drawBands();
    this.drawStack();
    this.drawPredicted();
    this.drawPeak();
    pen.restore();
    if (this.dragged) {
      pen.fillStyle = colour("band");
      pen.fillRect(Math.min(...this.dragged), MARGIN.top, Math.abs(this.dragged[1] - this.dragged[0]), this.height);
    }
    if (this.cursor !== undefined) {
      pen.fillStyle = colour("ink");
      pen.fillRect(Math.round(this.x(this.place(this.cursor))), MARGIN.top, 1, this.height);
    }
  }

  drawAxes() {
    const pen = this.pen, unit = this.top >= 2 ** 30 ? 2 ** 30 : 2 ** 20;
    const name = unit === 2 ** 30 ? "GiB" : "MiB", step = niceStep(this.top / unit / 5);
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (let value = 0; value * unit <= this.top; value += step) {
      pen.fillStyle = colour("line");
      pen.fillRect(MARGIN.left, Math.round(this.y(value * unit)), this.width, 1);
      pen.fillStyle = colour("soft");
      pen.fillText(Number(value.toPrecision(6)) + (value === 0 ? " " + name : ""), MARGIN.left - 6, this.y(value * unit));
    }
    pen.textBaseline = "alphabetic";
    const wanted = niceStep((this.to - this.from) / Math.max(2, this.width / 110));
    for (let at = Math.ceil(this.from / wanted) * wanted; at <= this.to; at += wanted) {
      pen.textAlign = this.x(at) > MARGIN.left + this.width - 30 ? "right" : "center";
      const value = (alongTime ? Number(at.toPrecision(8)) : this.eventAt(at) + 1).toLocaleString("en");
      pen.fillText(alongTime ? value + " ms" : "event " + value, this.x(at), MARGIN.top + this.height + 15);
    }
  }

  drawBands() {
    const pen = this.pen;
    pen.textAlign = "center";
    this.run.bands.forEach(([name, step, start, end], number) => {
      const left = Math.max(MARGIN.left, this.x(this.place(start - 1)));
      const right = Math.min(MARGIN.left + this.width, this.x(this.place(end - 1)));
      if (right <= left) return;
      if (number % 2) {
        pen.fillStyle = colour("band");
        pen.fillRect(left, 0, right - left, MARGIN.top + this.height);
      }
      const full = step ? `${name} ${step}` : name, short = step ? `${name[0]}${step}` : name[0];
      const text = [full, short].find((each) => pen.measureText(each).width < right - left - 4);
      pen.fillStyle = colour("soft");
      if (text) pen.fillText(text, (left + right) / 2, 14);
    });
  }

  // One column a pixel, from the event in it at which most is alive.
  drawStack() {
    const pen = this.pen, fills = NAMES.map(colour);
    const columns = Math.max(1, Math.floor(this.width));
    let latest = this.eventAt(this.placeAt(MARGIN.left));
    for (let column = 0; column < columns; column++) {
      const last = this.eventAt(this.placeAt(MARGIN.left + column + 1));
      let most = last > latest ? latest + 1 : latest;
      for (let i = latest + 2; i <= last; i++) if (this.totals[i] > this.totals[most]) most = i;
      if (most >= 0) {
        let below = 0;
        for (let c = 0; c < NAMES.length; c++) {
          const size = this.live[c][most];
          if (size <= 0) continue;
          const high = this.y(below + size), low = this.y(below);
          pen.fillStyle = fills[c];
          pen.fillRect(MARGIN.left + column, high, 1.02, low - high);
          below += size;
        }
      }
      latest = Math.max(latest, last);
    }
  }

  drawPredicted() {
    if (!this.run.predicted) return;
    const pen = this.pen;
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 1.6;
    pen.setLineDash([6, 4]);
    for (const [name, , start, end] of this.run.bands) {
      const bytes = this.run.predicted[name];
      if (!bytes) continue;
      pen.beginPath();
      pen.moveTo(this.x(this.place(start - 1)), this.y(bytes));
      pen.lineTo(this.x(this.place(end - 1)), this.y(bytes));
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  drawPeak() {
    const pen = this.pen, i = this.run.peak, x = this.x(this.place(i)), y = this.y(this.totals[i]);
    const right = x > MARGIN.left + this.width / 2;
    pen.fillStyle = colour("ink");
    pen.beginPath();
    pen.arc(x, y, 4, 0, 2 * Math.PI);
    pen.fill();
    pen.textAlign = right ? "right" : "left";
    pen.fillText("peak " + inBytes(this.totals[i]), x + (right ? -8 : 8), y - 6);
  }

  // --- what is said of a place ----------------------------------------------------------------------------------------

  phaseAt(i) {
    const found = this.run.phases.find(([, , , , start, end]) => start <= i && i < end);
    if (!found) return "";
    const [name, step, layer, recomputed] = found;
    return name + (step ? ` of step ${step}` : "") + (layer === null ? "" : `, layer ${layer}`) + (recomputed ? ", recomputing" : "");
  }

  said(i) {
    const event = this.run.events[i], block = event >= 0 ? event : ~event;
    const what = `${event >= 0 ? "allocates" : "frees"} ${inBytes(this.run.sizes[block])} of ${title(this.run.categories[block])}`;
    return [`${inBytes(this.totals[i])}, ${this.phaseAt(i)}`, what, this.run.callTable[this.run.calls[block]][0],
      `event ${(i + 1).toLocaleString("en")}, ${this.run.times[i].toLocaleString("en")} ms`];
  }

  hover(x) {
    const i = this.eventAt(this.placeAt(x));
    if (i < 0 || x < MARGIN.left || x > MARGIN.left + this.width) return this.leave();
    this.cursor = i;
    const [heading, what, call, where] = this.said(i);
    this.tip.replaceChildren(element("b", heading), element("span", what), element("i", call), element("i", where));
    for (let c = NAMES.length - 1; c >= 0; c--) {
      if (!this.live[c][i]) continue;
      const line = element("span", `${title(c)} ${inBytes(this.live[c][i])}`);
      line.prepend(key(`var(--${NAMES[c]})`));
      this.tip.append(line);
    }
    this.tip.hidden = false;
    const left = x < MARGIN.left + this.width / 2 ? x + 14 : x - 14 - this.tip.offsetWidth;
    this.tip.style.transform = `translate(${Math.max(0, Math.min(left, this.canvas.clientWidth - this.tip.offsetWidth))}px, 34px)`;
    this.draw();
  }

  leave() {
    this.cursor = undefined;
    this.tip.hidden = true;
    this.draw();
  }

  // Under the chart: the largest groups of blocks alive at an event.
  keep(i) {
    const alive = new Set();
    for (let e = 0; e <= i; e++) if (this.run.events[e] >= 0) alive.add(this.run.events[e]); else alive.delete(~this.run.events[e]);
    const groups = new Map();
    for (const block of alive) {
      const key = `${this.run.categories[block]} ${this.run.calls[block]}`;
      const group = groups.get(key) || { bytes: 0, count: 0, block };
      group.bytes += this.run.sizes[block];
      group.count += 1;
      groups.set(key, group);
    }
    const largest = [...groups.values()].sort((a, b) => b.bytes - a.bytes).slice(0, 10);
    const rows = largest.map(({ bytes, count, block }) => {
      const call = this.run.callTable[this.run.calls[block]], said = element("td", call[0]);
      said.title = call.slice(1).join("\n");
      return element("tr", undefined, "", element("td", inBytes(bytes), "n"), element("td", `${count} x`, "n"),
        element("td", title(this.run.categories[block])), said);
    });
    const [heading, what, call, where] = this.said(i);
    this.kept.replaceChildren(element("h3", `${where}: ${heading}`), element("p", `It ${what}: ${call}`, "note"),
      element("div", undefined, "scroll", element("table", undefined, "", ...rows)));
  }

  // --- pointer and keys ----------------------------------------------------------------------------------------------

  listen() {
    const at = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse") this.dragged = [at(event), at(event)];
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.dragged) this.dragged[1] = at(event);
      this.hover(at(event));
    });
    window.addEventListener("pointerup", () => {
      if (!this.dragged) return;
      const [a, b] = [...this.dragged].sort((p, q) => p - q);
      this.dragged = undefined;
      if (b - a > 6) { this.suppressed = true; this.show(this.placeAt(a), this.placeAt(b)); } else this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => this.leave());
    this.canvas.addEventListener("click", (event) => {
      if (this.suppressed) { this.suppressed = false; return; }
      this.hover(at(event));
      const i = this.eventAt(this.placeAt(at(event)));
      if (i >= 0) this.keep(i);
    });
    this.canvas.addEventListener("dblclick", () => { this.all(); this.draw(); });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 200), this.placeAt(at(event)));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => {
      const shift = (this.to - this.from) / 4;
      const act = { "+": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => { this.all(); this.draw(); },
        ArrowLeft: () => this.show(this.from - shift, this.to - shift), ArrowRight: () => this.show(this.from + shift, this.to + shift) }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  return power * [1, 2, 5, 10].find((each) => each * power >= rough);
}

const charts = [...document.querySelectorAll(".memory")].map((place, i) => new Chart(runs[i], place));
const top_ = 1.08 * Math.max(1, ...charts.map((chart) => chart.highest()));
for (const chart of charts) chart.top = top_;
const redraw = () => charts.forEach((chart) => chart.draw());
const button = (id, text, act) => {
  const made = element("button", text);
  made.id = id;
  made.type = "button";
  made.addEventListener("click", act);
  return made;
};
const axis = button("axis", "along time", () => {
  alongTime = !alongTime;
  axis.textContent = alongTime ? "along allocations" : "along time";
  axis.setAttribute("aria-pressed", String(alongTime));
  charts.forEach((chart) => chart.all());
  redraw();
});
axis.setAttribute("aria-pressed", "false");
const legend = categories.map(([name, words]) => element("span", undefined, "", key(`var(--${name})`), words));
if (runs.some((run) => run.predicted)) legend.push(element("span", undefined, "", key(), "predicted peak of the phase"));
document.querySelector(".controls").replaceChildren(
  element("div", undefined, "legend", ...legend),
  element("div", undefined, "buttons", axis,
    button("in", "zoom in", () => charts.forEach((chart) => chart.zoom(0.5))),
    button("out", "zoom out", () => charts.forEach((chart) => chart.zoom(2))),
    button("all", "show all", () => { charts.forEach((chart) => chart.all()); redraw(); }),
    element("span", "Drag to zoom in, double-click to show all; click or tap to keep a place.", "note")));
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
document.documentElement.dataset.drawn = String(charts.length);
