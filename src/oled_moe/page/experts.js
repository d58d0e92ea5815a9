// The experts beside the chat: what each did in the latest forward, and how it went over time.

import { getJson } from "/page/api.js";
import { drawGrid, drawMark, expertAt } from "/page/grid.js";
import { drawChart } from "/page/chart.js";

const BUSY_MS = 250;
const IDLE_MS = 3000;

const TIER_NAMES = { ram: "RAM", gpu: "GPU memory", emulated: "emulated GPU memory" };

const byId = (id) => document.getElementById(id);

export class ExpertPanel {
  constructor() {
    this.isBusy = false;
    this.timer = 0;
    this.snapshot = null;
    this.geometry = null;
    document.addEventListener("visibilitychange", () => this.poll());
    new ResizeObserver(() => this.draw()).observe(byId("grid").parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    byId("grid").addEventListener("mousemove", (event) => this.point(event));
    this.note = byId("grid-note").textContent;
    byId("grid").addEventListener("mouseleave", () => { byId("grid-note").textContent = this.note; });
    this.poll();
  }

  /** Look often while this page waits for an answer, and once more when it has come. */
  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.poll();
  }

  /** Ask the server now, then again and again; a hidden page asks nothing. */
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    // The latest call goes on; one that was overtaken ends with its reply.
    const turn = (this.turn = (this.turn ?? 0) + 1);
    try {
      this.snapshot = await getJson("/experts");
      this.draw();
    } catch (error) {
      byId("experts-facts").textContent = error.message;
    }
    if (turn !== this.turn) return;
    const isBusy = this.isBusy || (this.snapshot?.num_running ?? 0) > 0;
    this.timer = setTimeout(() => this.poll(), isBusy ? BUSY_MS : IDLE_MS);
  }

  draw() {
    const snapshot = this.snapshot;
    if (!snapshot) return;
    byId("experts-facts").textContent = factsOf(snapshot);
    this.geometry = drawGrid(byId("grid"), snapshot.layers.map((layer) => layer.states));
    showStates(snapshot.state_names);
    showSeries(snapshot.series);
    showLayers(snapshot.layers);
  }

  point(event) {
    const found = this.geometry && expertAt(this.geometry, event.offsetX, event.offsetY);
    if (!found) return;
    const state = this.snapshot.layers[found.layer].states[found.expert];
    byId("grid-note").textContent =
      `Layer ${found.layer}, expert ${found.expert}: ${this.snapshot.state_names[state]}`;
  }
}

function factsOf(snapshot) {
  const total = snapshot.num_experts * snapshot.layers.length;
  const resident = snapshot.layers.reduce((sum, layer) => sum + layer.resident, 0);
  const moved = snapshot.bytes
    .map(({ src, dst, bytes }) => `${sizeOf(bytes)} from ${tierOf(src)} to ${tierOf(dst)}`)
    .join(", ");
  const waiting = snapshot.num_waiting ? `, ${snapshot.num_waiting} waiting` : "";
  const form = snapshot.low_precision ? ` with ${snapshot.low_precision}` : "";
  const lossy = snapshot.lossy ? `, lossy ${snapshot.lossy}${form}` : "";
  return `${resident} of ${total} experts resident, policy ${snapshot.policy}${lossy}, device ` +
    `${snapshot.device}; ${moved}; ${snapshot.num_running} running${waiting}.`;
}

function tierOf(name) {
  return TIER_NAMES[name] ?? name;
}

/** The legend of the grid, drawn with the same marks. */
function showStates(names) {
  byId("states").replaceChildren(...Object.entries(names).map(([state, name]) => {
    const item = document.createElement("li");
    const canvas = document.createElement("canvas");
    canvas.setAttribute("aria-hidden", "true");
    drawMark(canvas, state);
    item.append(canvas, ` ${name}`);
    return item;
  }));
}

function showSeries(series) {
  const percent = (value) => `${Math.round(100 * value)} %`;
  const milliseconds = (value) => (value ? `${(1000 * value).toPrecision(3)} ms` : "0 ms");
  showLatest("hit-rate", series.hit_rate, percent);
  showLatest("utilization", series.utilization, percent);
  showLatest("tpot", series.tpot_s, milliseconds);
  drawChart(byId("ratios"), {
    lines: [series.hit_rate, series.utilization],
    most: 1,
    format: percent,
    across: "forwards",
  });
  drawChart(byId("times"), {
    lines: [series.tpot_s],
    most: roundUp(Math.max(0.001, ...series.tpot_s)),
    format: milliseconds,
    across: "forwards",
  });
}

function showLatest(id, values, format) {
  const value = values.at(-1);
  byId(id).textContent = value === undefined || value === null ? "–" : format(value);
}

/** The next of 1, 2, 5, 10, … so that the axis does not jump with every forward. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

function showLayers(layers) {
  byId("layers").replaceChildren(...layers.map((layer, index) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = index;
    const { resident, capacity, hits, loads, cpu_runs: cpu, ahead, evictions } = layer;
    const cells = [`${resident} / ${capacity}`, hits, loads, cpu, ahead, evictions].map((value) => {
      const cell = document.createElement("td");
      cell.textContent = value;
      return cell;
    });
    row.append(head, ...cells);
    return row;
  }));
}

function sizeOf(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  const value = bytes / 1024 ** power;
  return `${power && value < 100 ? value.toPrecision(3) : Math.round(value)} ${units[power]}`;
}
