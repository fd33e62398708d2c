"use strict";
const $ = (id) => document.getElementById(id);
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};

// ---------------------------------------------------------------- settings

const SETTINGS = { system: "", temperature: "0.7", top_p: "0.95", max_tokens: "512", seed: "", key: "", theme: "" };
const load = (name) => {
  try { return localStorage.getItem("moeflux." + name) ?? SETTINGS[name]; } catch { return SETTINGS[name]; }
};
for (const name of Object.keys(SETTINGS)) {
  $(name).value = load(name);
  $(name).addEventListener("change", () => {
    try { localStorage.setItem("moeflux." + name, $(name).value); } catch { /* private windows keep nothing */ }
    if (name === "theme") showTheme();
    if (name === "key") watch();
  });
}
const showTheme = () => {
  if ($("theme").value) document.documentElement.dataset.theme = $("theme").value;
  else delete document.documentElement.dataset.theme;
};
showTheme();
const headers = () => ({
  "content-type": "application/json",
  ...($("key").value ? { authorization: "Bearer " + $("key").value } : {}),
});

$("show-settings").addEventListener("click", () => $("settings").showModal());
$("show-engine").addEventListener("click", () => {
  $("engine").hidden = !$("engine").hidden;
  $("show-engine").setAttribute("aria-expanded", String(!$("engine").hidden));
});
if (matchMedia("(max-width: 720px)").matches) $("show-engine").click();

// ---------------------------------------------------------------- markdown

// Only elements made here reach the page: text from the model is never taken for HTML.
const INLINE = /(`+)([^]*?[^`])\1(?!`)|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;
function inline(text, parent) {
  for (let rest = text; rest; ) {
    const found = INLINE.exec(rest);
    if (!found) { parent.append(rest); return; }
    parent.append(rest.slice(0, found.index));
    if (found[2] !== undefined) parent.append(element("code", "", found[2].trim()));
    else if (found[3] !== undefined) inline(found[3], parent.appendChild(element("strong")));
    else if (found[4] !== undefined) inline(found[4], parent.appendChild(element("em")));
    else {
      const link = parent.appendChild(element("a", "", found[5]));
      link.href = found[6];
      link.rel = "noopener noreferrer";
      link.target = "_blank";
    }
    rest = rest.slice(found.index + found[0].length);
  }
}
function markdown(text, parent) {
  const lines = text.split("\n");
  let list = null;
  for (let at = 0; at < lines.length; at++) {
    const line = lines[at];
    const fence = /^\s*(```+|~~~+)/.exec(line);
    const item = /^\s*(?:([-*+])|(\d+)[.)])\s+(.*)$/.exec(line);
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (!item) list = null;
    if (fence) {
      const code = [];
      while (++at < lines.length && !lines[at].trim().startsWith(fence[1])) code.push(lines[at]);
      parent.appendChild(element("pre")).append(element("code", "", code.join("\n")));
    } else if (item) {
      const tag = item[1] ? "ul" : "ol";
      if (!list || list.localName !== tag) list = parent.appendChild(element(tag));
      inline(item[3], list.appendChild(element("li")));
    } else if (heading) {
      inline(heading[2], parent.appendChild(element("h" + Math.min(6, heading[1].length + 2))));
    } else if (line.startsWith(">")) {
      inline(line.replace(/^>\s?/, ""), parent.appendChild(element("blockquote")));
    } else if (line.includes("|") && /^\s*\|?[\s:|-]+\|[\s:|-]*$/.test(lines[at + 1] ?? "")) {
      const table = parent.appendChild(element("table"));
      for (let row = at; row < lines.length && lines[row].includes("|"); row++) {
        if (row === at + 1) continue;
        const cells = table.appendChild(element("tr"));
        for (const cell of lines[row].trim().replace(/^\||\|$/g, "").split("|")) {
          inline(cell.trim(), cells.appendChild(element(row === at ? "th" : "td")));
        }
        lines[row] = "";
      }
      at++;
    } else if (line.trim()) {
      const paragraph = [line];
      while (lines[at + 1]?.trim() && !/^\s*(```|~~~|[-*+]\s|\d+[.)]\s|#{1,6}\s|>)/.test(lines[at + 1])) {
        paragraph.push(lines[++at]);
      }
      inline(paragraph.join("\n"), parent.appendChild(element("p")));
    }
  }
}

// ---------------------------------------------------------------- conversation

let messages = [];
let asking = null;

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const data = held.slice(0, end).split("\n").filter((l) => l.startsWith("data: ")).map((l) => l.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function request() {
  const number = (name) => ($(name).value === "" ? undefined : Number($(name).value));
  const system = $("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), seed: number("seed"),
    stream: true, stream_options: { include_usage: true },
  };
}

function facts(usage) {
  const own = usage.moeflux;
  const parts = [`${usage.completion_tokens} tokens, ${own.tokens_per_second.toFixed(1)}/s`];
  parts.push(`first after ${own.first_token_seconds.toFixed(2)} s`);
  const cached = usage.prompt_tokens_details.cached_tokens;
  parts.push(`prompt ${usage.prompt_tokens}` + (cached ? ` (${cached} known)` : ""));
  const lookups = own.expert_hits + own.expert_misses;
  if (lookups) parts.push(`experts ${(100 * own.expert_hits / lookups).toFixed(1)} % in memory`);
  if (own.expert_bytes_read) parts.push(`${bytes(own.expert_bytes_read)} read`);
  return parts.join(" · ");
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  $("empty").hidden = true;
  $("messages").append(element("div", "message user", text));
  const shown = $("messages").appendChild(element("div", "message assistant working"));
  const controller = (asking = new AbortController());
  $("send").hidden = true;
  $("stop").hidden = false;
  let answer = "", thought = "", usage = null, drawn = false;
  const draw = () => {
    drawn = false;
    const log = $("messages");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    shown.replaceChildren();
    if (thought) {
      const details = shown.appendChild(element("details"));
      details.append(element("summary", "", "Reasoning"), thought);
      details.open = !answer;
    }
    markdown(answer, shown);
    if (usage) shown.append(element("div", "facts", facts(usage)));
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  const redraw = () => { if (!drawn) { drawn = true; requestAnimationFrame(draw); } };
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: controller.signal,
    });
    if (!response.ok) {
      const problem = await response.json().catch(() => null);
      throw new Error(problem?.error?.message ?? `status ${response.status}`);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta;
      answer += delta?.content ?? "";
      thought += delta?.reasoning_content ?? "";
      usage = event.usage ?? usage;
      redraw();
    }
    $("status").textContent = "";
  } catch (error) {
    const stopped = error.name === "AbortError";
    $("status").textContent = stopped ? "Stopped." : "";
    if (!stopped) $("messages").append(element("div", "message error", error.message));
  }
  draw();
  shown.classList.remove("working");
  if (answer) messages.push({ role: "assistant", content: answer });
  else { messages.pop(); if (!thought) shown.remove(); }
  asking = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("input").focus();
}

function fit() {
  $("input").style.height = "auto";
  $("input").style.height = $("input").scrollHeight + 2 + "px";
}
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || asking) return;
  $("input").value = "";
  fit();
  ask(text);
});
$("input").addEventListener("input", fit);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
const stop = () => asking?.abort();
$("stop").addEventListener("click", stop);
const begin = () => {
  stop();
  messages = [];
  for (const old of $("messages").querySelectorAll(".message")) old.remove();
  $("empty").hidden = false;
  $("status").textContent = "";
  $("input").focus();
};
$("new").addEventListener("click", begin);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) stop();
  if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) { event.preventDefault(); begin(); }
});

// ---------------------------------------------------------------- engine

const HISTORY = 150;
let model = null;
let heat = [];
let past = [];
let watching = null;

const bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; count >= 1024 && unit < 3; unit++) count /= 1024;
  return count.toFixed(unit ? 1 : 0) + " " + units[unit];
};

function look(data) {
  if (data.model) {
    model = data.model;
    heat = model.experts.map((count) => new Float32Array(count));
    past = [];
    $("model").textContent = `${model.name} · ${model.backend}`;
    $("heat-text").textContent = `${model.layers.length} layers of ${Math.max(0, ...model.experts)} experts; ` +
      `${model.expert_slots >= model.all_experts ? "all" : model.expert_slots + " of " + model.all_experts} fit in memory. ` +
      "Bright cells are being used.";
  }
  $("speed").textContent = (data.tokens_per_second ?? 0).toFixed(1);
  $("prompts").textContent = (data.prompt_tokens_per_second ?? 0).toFixed(0);
  $("hits").textContent = (100 * data.hit_rate).toFixed(1) + " %";
  $("read").textContent = bytes(data.read_bytes_per_second ?? 0) + "/s";
  $("requests").textContent = data.running + (data.waiting ? ` + ${data.waiting} waiting` : "");
  $("pages").textContent = `${data.kv_pages_used} of ${data.kv_pages}`;
  past.push([data.tokens_per_second ?? 0, data.read_bytes_per_second ?? 0]);
  if (past.length > HISTORY) past.shift();
  for (const [layer, cells] of heat.entries()) {
    const used = data.heat?.[layer];
    const most = used ? Math.max(...used) : 0;
    for (let i = 0; i < cells.length; i++) cells[i] = Math.max(cells[i] * 0.82, most ? used[i] / most : 0);
  }
  if (!$("engine").hidden) { drawHeat(); drawHistory(); }
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawHeat() {
  const canvas = $("heat");
  const columns = Math.max(1, ...heat.map((cells) => cells.length));
  // Many experts wrap, so that cells stay big enough to see.
  const wide = Math.min(columns, 64), rows = Math.ceil(columns / wide);
  const width = canvas.clientWidth || 300, cell = width / wide;
  const height = Math.max(2, Math.min(cell, 14)), gap = rows > 1 ? 2 : 0;
  const scale = devicePixelRatio || 1;
  const total = heat.length * (rows * height + gap);
  canvas.style.height = total + "px";
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(total * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(total * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, total);
  const cold = colour("--cold"), hot = colour("--accent");
  for (const [layer, cells] of heat.entries()) {
    for (let i = 0; i < cells.length; i++) {
      const x = (i % wide) * cell, y = layer * (rows * height + gap) + Math.floor(i / wide) * height;
      context.globalAlpha = 1;
      context.fillStyle = cold;
      context.fillRect(x, y, Math.max(cell - 1, 1), Math.max(height - 1, 1));
      if (cells[i] > 0.01) {
        context.globalAlpha = Math.min(1, cells[i]);
        context.fillStyle = hot;
        context.fillRect(x, y, Math.max(cell - 1, 1), Math.max(height - 1, 1));
      }
    }
  }
  context.globalAlpha = 1;
}

function drawHistory() {
  const canvas = $("history"), context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  for (const [series, name] of [[1, "--disk"], [0, "--accent"]]) {
    const most = Math.max(1e-9, ...past.map((values) => values[series]));
    if (series) $("most-read").textContent = most > 1 ? `, up to ${bytes(most)}/s` : "";
    else $("most-speed").textContent = most > 0.1 ? `, up to ${most.toFixed(1)}` : "";
    context.strokeStyle = colour(name);
    context.lineWidth = 3;
    context.beginPath();
    past.forEach((values, index) => {
      const x = canvas.width * (1 - (past.length - 1 - index) / (HISTORY - 1));
      context.lineTo(x, canvas.height - 3 - (canvas.height - 8) * values[series] / most);
    });
    context.stroke();
  }
}

async function watch() {
  watching?.abort();
  const controller = (watching = new AbortController());
  while (!controller.signal.aborted) {
    try {
      const response = await fetch("api/live", { headers: headers(), signal: controller.signal });
      if (response.status === 401) { $("status").textContent = "This server requires an API key: see Settings."; return; }
      if (!response.ok) throw new Error(`status ${response.status}`);
      $("status").textContent = "";
      for await (const data of events(response)) look(data);
    } catch (error) {
      if (error.name === "AbortError") return;
      $("status").textContent = "The server does not respond.";
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}
watch();
