// Shows the steps of an answer one after another, each long enough to be seen.

// Small models denoise faster than anybody sees: a step stays at least this long.
const LEAST_MS = 120;
// Where the network delivered more than this at once, steps are passed over quickly.
const MOST_WAITING = 40;

export class Player {
  /** Once `signal` is aborted nothing more is shown. */
  constructor(signal) {
    this.signal = signal;
    this.waiting = [];
    this.running = null;
  }

  /** Call `draw` when its turn comes; after a step there is a pause. */
  add(draw, isStep) {
    this.waiting.push({ draw, isStep });
    this.running ??= this.run();
  }

  /** Wait until everything is shown. */
  async end() {
    await this.running;
  }

  async run() {
    // Nothing before this line is done, so that `running` is set when it is done with.
    await null;
    while (this.waiting.length && !this.signal.aborted) {
      const { draw, isStep } = this.waiting.shift();
      draw();
      const isSeen = !document.hidden && this.waiting.length < MOST_WAITING;
      if (isStep && isSeen) await pause(LEAST_MS);
    }
    this.running = null;
  }
}

function pause(milliseconds) {
  return new Promise((resolve) => { setTimeout(resolve, milliseconds); });
}
