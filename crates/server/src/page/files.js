// Text files and pictures that go with the next message.

import { $, bytes, button, element } from "./dom.js";
import { readsPictures } from "./engine.js";

const MOST = 1 << 20;
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// Pixels that larger pictures are reduced to where their files are large.
const MOST_PIXELS = 1 << 21;
let chosen = [];

// What is shown of a file.
export function shown(file) {
  if (!file.url) return element("span", "file", `${file.name} · ${bytes(file.text.length)}`);
  const picture = element("img", "picture");
  picture.src = file.url;
  picture.alt = picture.title = file.name;
  return picture;
}

function show() {
  $("files").replaceChildren(...chosen.map((file) => {
    const remove = button("×", `Leave out ${file.name}`, () => { chosen = chosen.filter((other) => other !== file); show(); });
    remove.setAttribute("aria-label", `Leave out ${file.name}`);
    const one = file.url ? element("span", "file", shown(file)) : shown(file);
    one.append(" ", remove);
    return one;
  }));
  $("files").hidden = chosen.length === 0;
}

// A picture as a data URL.
async function read(file) {
  if (file.size > MOST) return reduced(file);
  const reader = new FileReader();
  return new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// The same with fewer pixels, as JPEG.
async function reduced(file) {
  const picture = await createImageBitmap(file);
  const factor = Math.min(1, Math.sqrt(MOST_PIXELS / (picture.width * picture.height)));
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * factor));
  canvas.height = Math.max(1, Math.round(picture.height * factor));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

// Whether the browser can show what a data URL holds.
async function isPicture(url) {
  const picture = new Image();
  picture.src = url;
  return picture.decode().then(() => true, () => false);
}

async function takePicture(file, tell) {
  if (!readsPictures()) { tell(`${file.name} is a picture, and this model reads none.`); return; }
  const url = await read(file).catch(() => null);
  if (url && await isPicture(url)) chosen.push({ name: file.name, url });
  else tell(`${file.name} is a picture that cannot be read.`);
}

// Takes pictures, and files that are text; tells of those that are not.
async function take(files, tell) {
  for (const file of files) {
    if (PICTURES.includes(file.type)) { await takePicture(file, tell); continue; }
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
    await take([...$("file").files], tell);
    $("file").value = "";
  });
  $("input").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    take([...event.clipboardData.files], tell);
  });
  const area = $("chat");
  area.addEventListener("dragover", (event) => event.preventDefault());
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    take([...event.dataTransfer.files], tell);
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
