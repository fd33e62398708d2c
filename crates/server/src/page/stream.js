// Answers of the server as they come.

import { headers } from "./settings.js";

export async function problem(response) {
  const told = await response.json().catch(() => null);
  return new Error(told?.error?.message ?? `The server answered with status ${response.status}.`);
}

// The data of server-sent events.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const lines = held.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
    }
  }
}

// Asks for an answer, and tells `update` of its parts: text, thought, progress, usage. Returns whether it was complete.
export async function answer(request, signal, update) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true }, return_progress: true }),
    signal,
  });
  if (!response.ok) throw await problem(response);
  let complete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") return complete;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    complete ||= Boolean(choice?.finish_reason);
    update({
      text: choice?.delta?.content ?? "",
      thought: choice?.delta?.reasoning_content ?? "",
      progress: event.prompt_progress,
      usage: event.usage,
    });
  }
  return false;
}
