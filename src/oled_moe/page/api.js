// Talks to the server this page came from.

const KEY_NAME = "oled-moe-api-key";
// One for as long as this page is open: where several replicas answer, the same one goes on
// answering, so that its experts stay warm and those shown are its own. crypto.randomUUID would
// need https.
const SESSION = Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("");

/** What went wrong, as one sentence for people; `status` is HTTP's, 0 where there was no reply. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Keep the key for as long as this tab lives, and nowhere else. */
export function keepKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

/** The JSON at `path`. Throws ApiError. */
export async function getJson(path) {
  const response = await request(path, { cache: "no-store" });
  return response.json();
}

/**
 * Stream one chat completion: yields the chunks of the reply, parsed.
 * Throws ApiError, also for an error that the server sends within the stream.
 */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let isWhole = false;
  for await (const data of serverEvents(response.body)) {
    if (data === "[DONE]") {
      isWhole = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  if (!isWhole) throw new ApiError("The server ended the answer before it was complete.");
}

async function request(path, options) {
  const key = sessionStorage.getItem(KEY_NAME);
  const headers = {
    ...options.headers,
    "X-Session-ID": SESSION,
    ...(key && { Authorization: `Bearer ${key}` }),
  };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached; is it still running?");
  }
  // What the API says of keys is for those who write the header themselves.
  if (response.status === 401) {
    const sentence = key ? "The server does not know this API key." : "The server asks for an API key.";
    throw new ApiError(sentence, 401);
  }
  if (!response.ok) throw new ApiError(await sentenceOf(response), response.status);
  return response;
}

async function sentenceOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

async function readOn(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke off before the answer was complete.");
  }
}

/** The data of each server-sent event; comments, which keep connections alive, are left out. */
async function* serverEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await readOn(reader);
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    // The last line may go on in the next piece.
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) {
        data.push(line.slice(5).trimStart());
      } else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
