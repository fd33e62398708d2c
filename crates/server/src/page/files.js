// Text files that go with the next message.

import { $, bytes, button, element } from "./dom.js";

const MOST = 1 << 20;
let chosen = [];

function show() {
  $("files").replaceChildren(...chosen.map((file) => {
    const remove = button("×", `Leave out ${file.name}`, () => { chosen = chosen.filter((other) => other !== file); show(); });
    remove.setAttribute("aria-label", `Leave out ${file.name}`);
    return element("span", "file", `${file.name} · ${bytes(file.text.length)} `, remove);
  }));
  $("files").hidden = chosen.length === 0;
}

// Takes files that are text; tells of those that are not.
async function take(files, tell) {
  for (const file of files) {
    if (file.size > MOST) { tell(`${file.name} has ${bytes(file.size)}; up to ${bytes(MOST)} can be attached.`); continue; }
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("binary");
      chosen.push({ name: file.name, text });
    } catch {
      tell(`${file.name} is not a text file.`);
    }
  }
  show();
}

export function attachments(tell) {
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    await take($("file").files, tell);
    $("file").value = "";
  });
  const area = $("chat");
  area.addEventListener("dragover", (event) => event.preventDefault());
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files, tell);
  });
}

export const hasFiles = () => chosen.length > 0;

// Gives the files away.
export function takeFiles() {
  const files = chosen;
  chosen = [];
  show();
  return files;
}

export function giveFiles(files) {
  chosen = [...files];
  show();
}
