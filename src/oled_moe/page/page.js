// The chat: what is asked, what is answered, and what went wrong.

import { ApiError, getJson, keepKey, streamChat } from "/page/api.js";
import { AnswerView } from "/page/answer.js";
import { Player } from "/page/player.js";
import { ExpertPanel } from "/page/experts.js";

const EXAMPLES = [
  "What is 12 + 30?",
  "Answer as JSON: What is 67 minus 3?",
  "Define task(text), which returns text repeated 4 times.",
];

// How often a server that is still loading its model is asked again.
const RETRY_MS = 2000;

const byId = (id) => document.getElementById(id);
const prompt = byId("prompt");
const transcript = byId("transcript");
const welcome = byId("welcome");
const panel = new ExpertPanel();

// The conversation as the API takes it, without the system prompt.
let messages = [];
// Of the answer under way; null while there is none.
let controller = null;

async function loadModels() {
  try {
    const { data } = await getJson("/v1/models");
    byId("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
    say("");
  } catch (error) {
    explain(error);
    if (error.status === 503) setTimeout(loadModels, RETRY_MS);
  }
}

async function send() {
  const text = prompt.value.trim();
  if (!text || controller) return;
  if (!byId("settings").checkValidity()) {
    byId("settings").parentElement.open = true;
    byId("settings").reportValidity();
    return;
  }
  say("");
  prompt.value = "";
  // A new chat may begin before this answer ends.
  const conversation = messages;
  conversation.push({ role: "user", content: text });
  welcome.remove();
  const question = addTurn("user", "You");
  question.text.textContent = text;
  const answer = addTurn("assistant", byId("model").value || "Model");
  const own = new AbortController();
  setController(own);
  try {
    await receive(answer, conversation, own.signal);
  } catch (error) {
    // Nothing is lost: what was asked can be changed and asked again.
    conversation.pop();
    question.turn.remove();
    answer.turn.remove();
    prompt.value = text;
    if (!messages.length) transcript.replaceChildren(welcome);
    explain(error);
  } finally {
    if (controller === own) setController(null);
  }
}

/** Show one answer as it comes. Throws ApiError unless some of it is there to be kept. */
async function receive(answer, conversation, signal) {
  answer.note.textContent = "Waiting for the first step";
  const view = new AnswerView(answer.text);
  const player = new Player(signal);
  const startMs = performance.now();
  let usage = null;
  let ending = "";
  let failure = null;
  try {
    for await (const chunk of streamChat(bodyOf(conversation), signal)) {
      usage = chunk.usage ?? usage;
      answer.name.textContent = chunk.model ?? answer.name.textContent;
      const [choice] = chunk.choices;
      if (choice) play(choice.delta, player, view, answer.note);
      if (choice?.finish_reason === "length") ending = "The answer was cut off at max tokens.";
    }
  } catch (error) {
    failure = error;
  }
  const seconds = (performance.now() - startMs) / 1000;
  await player.end();
  if (signal.aborted) ending = "Stopped.";
  else if (failure && !view.text) throw failure;
  else if (failure) ending = failure.message;
  keepAtEnd(() => {
    view.finish();
    answer.note.textContent = [ending, summaryOf(usage, seconds)].filter(Boolean).join(" ");
  });
  if (view.text) conversation.push({ role: "assistant", content: view.text });
  else conversation.pop();
  byId("announcer").textContent = `${view.text} ${ending}`;
}

/** Have a piece of the answer shown when its turn comes. */
function play({ content, diffusion: frame }, player, view, note) {
  if (frame && view.isNew(frame)) {
    player.add(() => keepAtEnd(() => {
      view.begin(frame);
      note.textContent = stepOf({ ...frame, step: -1, masked: frame.ids.length });
    }), true);
  }
  player.add(() => keepAtEnd(() => {
    if (content) view.append(content);
    if (!frame) return;
    view.show(frame);
    note.textContent = stepOf(frame);
  }), Boolean(frame));
  // After its last step was seen, and not with it.
  if (frame?.final) player.add(() => view.settle(), false);
}

function bodyOf(turns) {
  const system = byId("system").value.trim();
  const body = {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...turns] : turns,
    stream: true,
    stream_options: { include_usage: true },
    diffusing: true,
  };
  // What is left empty is the server's to say.
  for (const [field, id] of [
    ["max_tokens", "max-tokens"],
    ["temperature", "temperature"],
    ["threshold", "threshold"],
  ]) {
    if (byId(id).value !== "") body[field] = byId(id).valueAsNumber;
  }
  return body;
}

function addTurn(role, nameText) {
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  const name = document.createElement("h3");
  name.textContent = nameText;
  const text = document.createElement("p");
  text.className = "text";
  const note = document.createElement("p");
  note.className = "note quiet";
  turn.append(name, text, note);
  keepAtEnd(() => transcript.append(turn));
  return { turn, name, text, note };
}

/** Change the conversation, and stay at its end if that was in view. */
function keepAtEnd(change) {
  const scroller = getComputedStyle(transcript).overflowY === "visible"
    ? document.scrollingElement : transcript;
  const { scrollTop, clientHeight, scrollHeight } = scroller;
  // On narrow screens the experts lie below: there the browser is left to itself.
  const isAtEnd = scroller === transcript && scrollTop + clientHeight > scrollHeight - 40;
  change();
  if (isAtEnd) scroller.scrollTop = scroller.scrollHeight;
}

function stepOf({ block, step, steps_max: most, masked }) {
  const masks = counted(masked, "mask");
  return `Block ${block + 1}, step ${step + 1} of at most ${most}, ${masks} left`;
}

function summaryOf(usage, seconds) {
  if (!usage) return "";
  const parts = [`${counted(usage.completion_tokens, "token")} in ${seconds.toFixed(1)} s`];
  const { nfe, tokens_per_forward: perForward, expert_hit_rate: hitRate } = usage.diffusion ?? {};
  if (nfe) parts.push(`${counted(nfe, "forward")}, ${perForward.toFixed(1)} tokens each`);
  if (hitRate !== undefined) parts.push(`${Math.round(100 * hitRate)} % of experts were there`);
  return `${parts.join("; ")}.`;
}

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function setController(next) {
  const hadFocus = document.activeElement === byId("stop") || document.activeElement === byId("send");
  controller = next;
  byId("send").hidden = next !== null;
  byId("stop").hidden = next === null;
  panel.setBusy(next !== null);
  // A button that vanishes must not take the focus with it.
  if (hadFocus) prompt.focus();
}

function stop() {
  controller?.abort();
}

function startNewChat() {
  stop();
  setController(null);
  messages = [];
  say("");
  transcript.replaceChildren(welcome);
  prompt.focus();
}

function explain(error) {
  if (!(error instanceof ApiError)) throw error;
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  say(error.message);
}

function say(sentence) {
  byId("problem").textContent = sentence;
}

function useKey() {
  keepKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  prompt.focus();
  loadModels();
  panel.poll();
}

/** Have a form do something here instead of loading a page. */
function onSubmit(id, act) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

function onKey(event) {
  if (event.key === "Escape") stop();
}

function onPromptKey(event) {
  // While a character is being composed, Enter belongs to the input method.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

function addExamples() {
  byId("examples").replaceChildren(...EXAMPLES.map((text) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.addEventListener("click", () => {
      prompt.value = text;
      send();
    });
    return button;
  }));
}

onSubmit("composer", send);
onSubmit("key-form", useKey);
onSubmit("settings", () => prompt.focus());
byId("stop").addEventListener("click", stop);
byId("new-chat").addEventListener("click", startNewChat);
document.addEventListener("keydown", onKey);
prompt.addEventListener("keydown", onPromptKey);
addExamples();
loadModels();
prompt.focus();
