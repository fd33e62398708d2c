// What the engine does: figures, their last minute, and how much each expert is used.

import { $, bytes } from "./dom.js";
import { headers } from "./settings.js";
import { events } from "./stream.js";

const HISTORY = 150;
let model = null;
let heat = [];
let past = [];
let watching = null;

function look(data) {
  if (data.model) {
    model = data.model;
    heat = model.experts.map((count) => new Float32Array(count));
    past = [];
    $("heat-text").textContent = `${model.layers.length} layers of ${Math.max(0, ...model.experts)} experts; ` +
      `${model.expert_slots >= model.all_experts ? "all" : model.expert_slots + " of " + model.all_experts} fit in memory. ` +
      "Bright cells are being used.";
  }
  const { name, loaded_bytes, total_bytes } = data.loading ?? {};
  const served = model ? `${model.name} · ${model.backend}` : "";
  $("model").textContent = name ? `loading ${name}: ${bytes(loaded_bytes)} of ${bytes(total_bytes)}` : served;
  if (data.hit_rate === undefined) return;
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

// Whether the model that answers reads pictures; what is not known yet the server says.
export const readsPictures = () => model?.reads_pictures ?? true;

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

// Shows what the server tells, as long as it does; what is wrong goes to `tell`.
export async function watch(tell) {
  watching?.abort();
  const controller = (watching = new AbortController());
  let silent = true;
  while (!controller.signal.aborted) {
    try {
      const response = await fetch("api/live", { headers: headers(), signal: controller.signal });
      if (response.status === 401) { tell("This server requires an API key: see Settings."); return; }
      if (!response.ok) throw new Error(`status ${response.status}`);
      if (silent) tell("");
      silent = false;
      for await (const data of events(response)) look(JSON.parse(data));
    } catch (error) {
      if (error.name === "AbortError") return;
      silent = true;
      tell("The server does not respond.");
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}
