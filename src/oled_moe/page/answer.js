// One answer on the page: what is denoised so far, and in the end its final text.
// Whatever a model says enters the page as text, never as markup.

// From which confidence on a token counts as what; the legend says the same.
const GRADES = [[0.95, "sure"], [0.7, "likely"], [0, "unsure"]];

export class AnswerView {
  /** Draws into `element`, which is empty. */
  constructor(element) {
    // What the API calls the answer: all final text so far.
    this.text = "";
    this.element = element;
    this.draft = document.createElement("span");
    // A screen reader hears the finished answer once, not every guess on the way.
    this.draft.setAttribute("aria-hidden", "true");
    element.append(this.draft);
    this.lastBlock = -1;
    // The block at work, one cell for each position; `start` is the first one's in the answer.
    this.cells = [];
    this.start = 0;
  }

  /** More of the answer is final. It is seen when its block is; see `finish`. */
  append(text) {
    this.text += text;
  }

  /** Whether a frame is the first of its block; asked once for each, in order of arrival. */
  isNew(frame) {
    const isNew = frame.block !== this.lastBlock;
    this.lastBlock = frame.block;
    return isNew;
  }

  /** A block begins as masks; without this one that fills at once would show none. */
  begin(frame) {
    this.start += this.cells.length;
    this.cells = frame.ids.map(() => document.createElement("span"));
    for (const cell of this.cells) cell.className = "mask";
    this.draft.append(...this.cells);
  }

  /** Show a denoising step: what it made of the positions of the block. */
  show(frame) {
    for (const cell of this.cells) cell.classList.remove("fresh");
    for (const { pos, from, to, conf } of frame.changed) {
      drawToken(this.cells[pos - this.start], to, from === null ? gradeOf(conf) : "edited", conf);
    }
  }

  /** No later step changes the block. */
  settle() {
    for (const cell of this.cells) {
      cell.classList.remove("fresh");
      cell.classList.add("settled");
    }
  }

  /** The answer is complete, or as complete as it will be: only its final text stays. */
  finish() {
    this.cells = [];
    this.element.textContent = this.text;
  }
}

function drawToken(cell, token, look, confidence) {
  cell.textContent = token;
  cell.className = `token fresh ${look}`;
  cell.title = `confidence ${Math.round(100 * confidence)} %`;
}

function gradeOf(confidence) {
  return GRADES.find(([least]) => confidence >= least)[1];
}
