// The page: a conversation with the model, and what the engine does meanwhile.

import { Chats } from "./chats.js";
import { $, element } from "./dom.js";
import { watch } from "./engine.js";
import { attachments, giveFiles, hasFiles, takeFiles } from "./files.js";
import * as log from "./log.js";
import { headers, keepSettings, sampling, system } from "./settings.js";
import * as store from "./store.js";
import { answer } from "./stream.js";

let conversation = store.fresh();
// What stops the answer that is being written.
let asking = null;
// How often an answer is kept while it is written, in milliseconds.
const KEEP = 500;

const tell = (text) => { $("status").textContent = text; };

// ---- a conversation

const actions = {
  edit(message) {
    if (asking || !mayCut(message)) return;
    $("input").value = message.text;
    giveFiles(message.files ?? []);
    fit();
    $("input").focus();
    cutFrom(message);
  },
  again(message) {
    if (asking || !mayCut(message)) return;
    cutFrom(message);
    ask();
  },
};

// Whether a message may be left out: what was said after it is lost then, but for the answer to it.
function mayCut(message) {
  const after = conversation.messages.slice(conversation.messages.indexOf(message) + 1);
  const questions = after.filter(({ role }) => role === "user").length;
  const what = questions === 1 ? "a later question and its answer" : `${questions} later questions and their answers`;
  return !questions || confirm(`This removes ${what}.`);
}

// Leaves out a message and all that follow.
function cutFrom(message) {
  conversation.messages.splice(conversation.messages.indexOf(message));
  show();
}

function show() {
  log.clear();
  for (const message of conversation.messages) {
    if (message.role === "user") log.showUser(message, actions);
    else log.showAnswer(message, actions);
  }
  log.toEnd(true);
}

function change(to) {
  asking?.abort();
  asking = null;
  busy(false);
  conversation = to;
  show();
  tell("");
  chats.list(conversation);
}

const chats = new Chats({
  async open(id) {
    const found = (await store.all()).find((one) => one.id === id);
    if (found) change(found);
    $("input").focus();
  },
  removed(id) {
    if (id === conversation.id) change(store.fresh());
    else chats.list(conversation);
  },
});
chats.renamed = (title) => { if (title) conversation.title = title; };

// ---- asking

function request(messages) {
  // An answer that failed with nothing is no part of what was said.
  const said = messages.filter((message) => message.role === "user" || message.text);
  const told = said.map((message) => ({ role: message.role, content: store.content(message) }));
  const first = system() ? [{ role: "system", content: system() }] : [];
  return { model: $("models").value || undefined, messages: [...first, ...told], ...sampling() };
}

// Asks for an answer to the conversation. Another may be on the page before it ends.
async function ask() {
  const own = conversation;
  // What is kept while it is written is cut off, should the page go.
  const message = { role: "assistant", text: "", thought: "", end: "cut" };
  const body = request(own.messages);
  own.messages.push(message);
  const shown = new log.Answer(message, actions);
  const controller = (asking = new AbortController());
  busy(true);
  tell("");
  shown.begin();
  await keep(own);
  try {
    let kept = performance.now();
    const complete = await answer(body, controller.signal, (parts) => {
      shown.update(parts);
      if (performance.now() < kept + KEEP) return;
      kept = performance.now();
      keep(own);
    });
    if (complete) delete message.end;
  } catch (error) {
    // A broken connection is an error of the network, whatever came before.
    const dropped = error instanceof TypeError && (message.text || message.thought);
    message.end = error.name === "AbortError" ? "stopped" : dropped ? "cut" : "failed";
    if (message.end === "failed") message.error = error.message;
  }
  await keep(own);
  if (own === conversation) shown.end();
  if (asking === controller) {
    asking = null;
    busy(false);
    $("input").focus();
    if (message.end === "stopped") tell("Stopped.");
  }
  chats.list(conversation);
}

// Keeps a conversation; where the browser has no room the page says so and goes on.
async function keep(own) {
  await store.keep(own).catch((error) => tell(`This conversation is not kept: ${error.message}`));
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

// ---- the message box

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = $("input").scrollHeight + 2 + "px";
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (asking || !(text || hasFiles())) return;
  const message = { role: "user", text, files: takeFiles() };
  $("input").value = "";
  fit();
  conversation.messages.push(message);
  log.showUser(message, actions);
  ask();
});
$("input").addEventListener("input", fit);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
attachments(tell);

// ---- buttons and keys

const begin = () => {
  change(store.fresh());
  giveFiles([]);
  $("input").focus();
};
$("new").addEventListener("click", begin);
$("stop").addEventListener("click", () => asking?.abort());
$("show-settings").addEventListener("click", () => $("settings").showModal());
$("show-engine").addEventListener("click", () => {
  $("engine").hidden = !$("engine").hidden;
  $("show-engine").setAttribute("aria-expanded", String(!$("engine").hidden));
});
if (matchMedia("(max-width: 720px)").matches) $("show-engine").click();
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) asking?.abort();
  if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) { event.preventDefault(); begin(); }
});

// ---- the server

// Models to choose from, where there are several.
async function listModels() {
  const response = await fetch("v1/models", { headers: headers() }).catch(() => null);
  const models = response?.ok ? (await response.json()).data : [];
  const before = $("models").value;
  $("models").replaceChildren(...models.map(({ id }) => element("option", "", id)));
  if (models.some(({ id }) => id === before)) $("models").value = before;
  $("models").hidden = models.length < 2;
}

keepSettings((name) => {
  if (name !== "key") return;
  watch(tell);
  listModels();
});
watch(tell);
listModels();
chats.list(conversation);
