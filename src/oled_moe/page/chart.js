// A small line chart with its axes named.

import { colorOf, contextOf } from "/page/canvas.js";

const LEFT = 52;
const BOTTOM = 18;
const TOP = 8;
const RIGHT = 6;
// Fewer points than this fill the chart from the left.
const LEAST_POINTS = 40;
const STYLES = [["line", []], ["line-2", [5, 3]]];

/** `lines`: values from 0 to `most`, null where there is none; `across` names the other axis. */
export function drawChart(canvas, { lines, most, format, across }) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const context = contextOf(canvas, width, height);
  const plot = { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM };
  const numPoints = Math.max(...lines.map((line) => line.length));
  drawAxes(context, plot, { most, format, across: `${numPoints} latest ${across}` });
  lines.forEach((line, index) => {
    const [color, dash] = STYLES[index];
    context.strokeStyle = colorOf(color);
    context.setLineDash(dash);
    drawLine(context, plot, line, most);
  });
}

function drawAxes(context, { x, y, width, height }, { most, format, across }) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colorOf("quiet");
  context.strokeStyle = colorOf("edge");
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const share of [0, 0.5, 1]) {
    const level = Math.round(y + height * (1 - share)) + 0.5;
    context.beginPath();
    context.moveTo(x, level);
    context.lineTo(x + width, level);
    context.stroke();
    context.fillText(format(most * share), x - 5, level);
  }
  context.textBaseline = "bottom";
  context.fillText(across, x + width, y + height + BOTTOM);
}

function drawLine(context, { x, y, width, height }, values, most) {
  context.lineWidth = 1.75;
  context.lineCap = "round";
  const last = Math.max(LEAST_POINTS, values.length) - 1;
  context.beginPath();
  let isDown = false;
  values.forEach((value, index) => {
    if (value === null) {
      isDown = false;
      return;
    }
    const across = x + (width * index) / last;
    const level = y + height * (1 - Math.min(1, value / most));
    if (!isDown) context.moveTo(across, level);
    // A point alone is seen too, as a line of no length with round ends.
    context.lineTo(across, level);
    isDown = true;
  });
  context.stroke();
}
