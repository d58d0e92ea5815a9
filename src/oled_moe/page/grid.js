// Layers × experts as marks that differ in shape as well as in colour.

import { colorOf, contextOf } from "/page/canvas.js";

const GUTTER = 24;
const LEAST_CELL = 7;
const MOST_CELL = 12;
const BAND_GAP = 5;

// State characters of the server, and how each is drawn: [colour, shape].
const MARKS = {
  ".": ["away", "dot"],
  r: ["resident", "small"],
  h: ["hit", "full"],
  a: ["ahead", "half"],
  l: ["loaded", "triangle"],
  s: ["streamed", "hollow"],
  c: ["cpu", "disc"],
  p: ["low", "wedge"],
};

/** Draw `states`, a string for each layer; returns where everything is. */
export function drawGrid(canvas, states) {
  const width = canvas.clientWidth;
  const geometry = geometryOf(width, states);
  const { bandHeight, columns, cell } = geometry;
  canvas.style.height = `${bandHeight * states.length}px`;
  const context = contextOf(canvas, width, bandHeight * states.length);
  const colors = Object.fromEntries(Object.entries(MARKS).map(([s, [name]]) => [s, colorOf(name)]));
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  states.forEach((row, layer) => {
    const top = layer * bandHeight;
    context.fillStyle = colorOf("quiet");
    context.fillText(layer, 2, top);
    for (let expert = 0; expert < row.length; expert++) {
      const x = GUTTER + (expert % columns) * cell;
      const y = top + Math.floor(expert / columns) * cell;
      drawShape(context, MARKS[row[expert]][1], colors[row[expert]], x, y, cell - 1.5);
    }
  });
  return geometry;
}

/** One mark alone, for the legend. */
export function drawMark(canvas, state) {
  const [name, shape] = MARKS[state];
  drawShape(contextOf(canvas, 12, 12), shape, colorOf(name), 1, 1, 10);
}

/** Which expert lies at a point, undefined where none does. */
export function expertAt({ bandHeight, columns, cell, numLayers, numExperts }, x, y) {
  const column = Math.floor((x - GUTTER) / cell);
  const layer = Math.floor(y / bandHeight);
  const expert = Math.floor((y - layer * bandHeight) / cell) * columns + column;
  const isThere = column >= 0 && column < columns && expert < numExperts && layer < numLayers;
  return isThere ? { layer, expert } : undefined;
}

/** As few lines for a layer as leave cells large enough, all equally long. */
function geometryOf(width, states) {
  const numExperts = states[0]?.length ?? 0;
  const room = width - GUTTER;
  const lines = Math.max(1, Math.ceil((numExperts * LEAST_CELL) / room));
  const columns = Math.max(1, Math.ceil(numExperts / lines));
  const cell = Math.min(MOST_CELL, room / columns);
  return { numLayers: states.length, numExperts, columns, cell, bandHeight: lines * cell + BAND_GAP };
}

function drawShape(context, shape, color, x, y, size) {
  context.fillStyle = context.strokeStyle = color;
  context.beginPath();
  if (shape === "dot") {
    context.rect(x + 0.36 * size, y + 0.36 * size, 0.28 * size, 0.28 * size);
  } else if (shape === "small") {
    context.rect(x + 0.2 * size, y + 0.2 * size, 0.6 * size, 0.6 * size);
  } else if (shape === "full") {
    context.rect(x, y, size, size);
  } else if (shape === "half") {
    context.rect(x, y + size / 2, size, size / 2);
  } else if (shape === "triangle") {
    context.moveTo(x, y + size);
    context.lineTo(x + size / 2, y);
    context.lineTo(x + size, y + size);
  } else if (shape === "wedge") {
    context.moveTo(x, y);
    context.lineTo(x + size / 2, y + size);
    context.lineTo(x + size, y);
  } else if (shape === "disc") {
    context.arc(x + size / 2, y + size / 2, size / 2, 0, 2 * Math.PI);
  } else {
    context.lineWidth = 1.5;
    context.strokeRect(x + 0.75, y + 0.75, size - 1.5, size - 1.5);
  }
  context.fill();
}
