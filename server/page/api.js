// Requests to this server, with the reader's API key, and the reading of event streams.

const KEY = "radixserve-api-key";
let asking = null;

/** fetch, with the key; asks for one when the server wants it (401), not when another would be needed (403). */
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers }).catch(unreachable);
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) === key) {
      asking ??= askForKey().finally(() => { asking = null; });
      await asking;
    }
  }
}

/** Browsers say "Failed to fetch", "network error" and the like. */
function unreachable(error) {
  throw error.name === "AbortError" ? error : new Error("the server cannot be reached");
}

export function askForKey() {
  const dialog = document.getElementById("key-dialog");
  const form = document.getElementById("key-form");
  const field = document.getElementById("key");
  field.value = "";
  form.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, field.value.trim());
    dialog.close();
  };
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
}

/** The events of a text/event-stream response: {event, data}. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(unreachable);
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let event = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        if (line.startsWith("event:")) event = line.slice(6).trim();
      }
      if (data.length) yield { event, data: data.join("\n") };
    }
  }
}

/** What an answer that is no success says. */
export async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}
