// What grid and charts share.

/** A context whose units are CSS pixels, sharp on any screen; what was drawn before is gone. */
export function contextOf(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

/** A colour of the style sheet, so that dark mode is said once. */
export function colorOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
