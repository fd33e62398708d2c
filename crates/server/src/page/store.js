// Conversations, kept in the browser: { id, title, updated, messages }. Where the browser keeps nothing they live as long
// as the page.
//
// A message is { role: "user", text, files: [{ name, text } or, of a picture, { name, url }] } or { role: "assistant", text, thought, facts, end }, `end` being
// undefined for a whole answer, else "stopped", "cut" or "failed" with `error`.

const STORE = "conversations";
const passing = new Map();
// What is deleted stays away, though an answer to it may still be written.
const removed = new Set();

const finished = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const database = (async () => {
  try {
    const opening = indexedDB.open("moeflux", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
    return await finished(opening);
  } catch {
    return null;
  }
})();

async function run(mode, action, otherwise) {
  const open = await database;
  return open ? finished(action(open.transaction(STORE, mode).objectStore(STORE))) : otherwise();
}

export const fresh = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()), title: "", updated: Date.now(), messages: [] });

// All of them, the latest first.
export async function all() {
  const found = await run("readonly", (store) => store.getAll(), () => [...passing.values()]);
  return found.sort((a, b) => b.updated - a.updated);
}

export async function keep(conversation) {
  conversation.updated = Date.now();
  await put(conversation);
}

export async function rename(conversation, title) {
  conversation.title = title;
  await put(conversation);
}

async function put(conversation) {
  if (removed.has(conversation.id)) return;
  const copy = structuredClone(conversation);
  await run("readwrite", (store) => store.put(copy), () => passing.set(copy.id, copy));
}

export async function remove(id) {
  removed.add(id);
  await run("readwrite", (store) => store.delete(id), () => passing.delete(id));
}

// What a conversation is called that nobody has named.
export function titleOf({ title, messages }) {
  const first = messages.find((message) => message.role === "user");
  const text = title || first?.text || first?.files?.[0]?.name || "New conversation";
  return text.length > 60 ? text.slice(0, 59) + "…" : text;
}

// As the model is told it: a text, or parts where there are pictures.
export function content(message) {
  const pictures = (message.files ?? []).filter(({ url }) => url);
  const text = written(message, () => "");
  if (!pictures.length) return text;
  const shown = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...shown, { type: "text", text }] : shown;
}

// A message as a text, with what `picture` makes of the names of pictures.
function written({ text, files = [] }, picture) {
  const fenced = ({ name, text, url }) => {
    if (url) return picture(name);
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map((found) => found[0].length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}\n${fence}`;
  };
  return [...files.map(fenced), text].filter(Boolean).join("\n\n");
}

export function asMarkdown(conversation) {
  const names = { user: "You", assistant: "Model" };
  const parts = conversation.messages.map((message) => `**${names[message.role]}**\n\n${written(message, (name) => `[${name}]`)}`);
  return `# ${titleOf(conversation)}\n\n${parts.join("\n\n---\n\n")}\n`;
}
