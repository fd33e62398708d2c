// What a reader does, and what the page must do then. Each check has a page of its own.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { fits, isAccessible } from "./looks.mjs";
import { fixtures } from "./server.mjs";
import { drawsBlocksOnce, showsCodeAndMath } from "./rich.mjs";

async function talks(visit, picture, name) {
  const { page, last } = visit;
  await visit.setting("temperature", "0");
  await page.locator("#model", { hasText: "demo" }).waitFor({ state: "attached" });
  await visit.say("What is 17 + 25?");
  await last.locator(".facts").waitFor({ timeout: 20_000 });
  await visit.ended();
  assert.match(await last.textContent(), /17 \+ 25 = 42/);

  // The heat map moves while an answer is written.
  const narrow = await page.locator("#engine").isHidden();
  if (narrow) await page.locator("#show-engine").click();
  const heat = () => page.evaluate(() => document.getElementById("heat").toDataURL());
  await page.waitForTimeout(2500);
  const cold = await heat();
  await visit.say("Tell me a short story about a fox.");
  await page.waitForFunction((cold) => document.getElementById("heat").toDataURL() !== cold, cold, { timeout: 60_000 });
  await visit.ended();
  assert.match(await page.locator("#hits").textContent(), /^\d+\.\d %$/);
  await picture(name);
  await fits(visit, name);
  await isAccessible(visit, name);
  if (narrow) await page.locator("#show-engine").click();
  await page.locator("#show-settings").click();
  await picture(`${name}-settings`);
  await isAccessible(visit, `${name}, settings`);
}

async function stops(visit) {
  const { page } = visit;
  await visit.setting("max_tokens", "900");
  await visit.setting("temperature", "1.6");
  for (const stop of [() => page.locator("#stop").click({ timeout: 1000 }), () => page.keyboard.press("Escape")]) {
    const status = page.locator("#status");
    // An answer may end before it can be stopped.
    for (let tries = 0; tries < 6 && (await status.textContent()) !== "Stopped."; tries++) {
      await page.locator("#new").click();
      await visit.say("Tell me a long story about two friends. Do not stop.");
      await begun(visit);
      await stop().catch(() => {});
      await visit.ended();
    }
    assert.equal(await status.textContent(), "Stopped.");
    await page.locator("#new").click();
  }
}

const begun = ({ page }) => page.waitForFunction(
  () => document.querySelector(".message.assistant:last-of-type")?.textContent.length > 20, null, { timeout: 5000 },
).catch(() => {});

/// Four answers are longer than the screen: the last words are on it, unless the reader scrolled up.
async function follows(visit) {
  const { page } = visit;
  const hidden = () => page.evaluate(() => {
    const log = document.getElementById("messages");
    return log.scrollHeight - log.scrollTop - log.clientHeight;
  });
  const answer = Array.from({ length: 30 }, (_, line) => `Line ${line}.`).join("\n\n");
  await visit.answer({ text: answer });
  for (let turn = 0; turn < 4; turn++) {
    await visit.say(`Turn ${turn}`);
    await visit.ended();
    assert.ok(await hidden() < 5, `turn ${turn}: ${await hidden()} pixels are hidden`);
  }
  // Who reads above is not pulled down while an answer is written.
  await visit.asked();
  await visit.say("Tell me a long story about a fox.");
  await begun(visit);
  await page.evaluate(() => { document.getElementById("messages").scrollTop = 0; });
  await visit.ended();
  assert.ok(await hidden() > 200);
}

/// A new conversation while an answer is written: the answer belongs to the old one.
async function begins(visit) {
  const { page } = visit;
  await visit.setting("max_tokens", "900");
  await visit.setting("temperature", "1.6");
  await visit.say("Tell me a long story about two friends. Do not stop.");
  await begun(visit);
  await page.keyboard.press("Control+Shift+O");
  assert.equal(await visit.messages(), 0);
  await visit.answer({ text: "Only this." });
  await visit.say("Another matter");
  await visit.ended();
  assert.equal(await visit.messages(), 2);
  assert.match(await visit.last.textContent(), /Only this/);
  assert.equal(await page.locator("#chat-list li").count(), 2);
}

/// What fails says so, stays, and can be asked again.
async function fails(visit) {
  const { page, last } = visit;
  await visit.answer({ status: 503, error: "The engine is resting." });
  await visit.say("Are you there?");
  await visit.ended();
  assert.match(await last.textContent(), /The engine is resting/);
  assert.match(await page.locator(".message.user").last().textContent(), /Are you there/);
  await visit.answer({ text: "Half an ans", cut: true });
  await last.getByRole("button", { name: "Retry" }).click();
  await last.getByText("The connection ended").waitFor();
  assert.match(await last.textContent(), /Half an ans/);
  await visit.answer({ text: "A whole answer." });
  await last.getByRole("button", { name: "Retry" }).click();
  await last.getByText("A whole answer.").waitFor();
  assert.equal(await visit.messages(), 2);
}

/// Text from the model: structure is shown, nothing of it runs, nothing of it takes long.
async function renders(visit) {
  const { page, last } = visit;
  const markdown = "# Title\n\n- one\n  - two\n    1. three\n\n| a | b |\n|:--|--:|\n| `x` | **y** |\n\n```js\nlet a = 1;\n```\n\n"
    + "<img src=x onerror=alert(1)> ![p](http://other.example/p.png) [bad](javascript:alert(1)) [good](https://example.org)";
  await visit.answer({ text: markdown });
  await visit.say("Show me");
  await visit.ended();
  const counts = {
    h1: 1, "ul > li > ul > li > ol > li": 1, "th.to-right": 1, "td strong": 1, "pre code": 1, img: 0, "a[href^=https]": 1,
    "a[href^=javascript]": 0,
  };
  // Also where the browser lends no clipboard.
  await page.evaluate(() => {
    Object.defineProperty(navigator, "clipboard", { value: undefined });
    document.addEventListener("copy", () => { globalThis.copied = String(document.activeElement.value); });
  });
  await last.locator("pre + .copy").click();
  assert.equal(await page.evaluate(() => globalThis.copied), "let a = 1;\n");
  for (const [selector, count] of Object.entries(counts)) assert.equal(await last.locator(selector).count(), count, selector);
  for (const text of ["`".repeat(2000), "*a ".repeat(3000), "[".repeat(3000), "> ".repeat(500) + "x", "- ".repeat(500) + "x",
    "$a".repeat(5000), "\\(".repeat(5000), "\\[\n".repeat(2000), "$" + "{".repeat(3000) + "}".repeat(900) + "$", "```js\n" + "`${".repeat(3000)]) {
    await visit.answer({ text });
    await visit.say("Odd");
    await visit.ended();
    // The slowest of what the page did at once, while and after it was written.
    const time = await page.evaluate(async (text) => {
      const { render } = await import("./markdown.js");
      const start = performance.now();
      render(text, document.createElement("div"));
      return performance.now() - start;
    }, text);
    assert.ok(time < 1000, `${JSON.stringify(text.slice(0, 8))} took ${time.toFixed(0)} ms`);
  }
}

/// Conversations stay, have names, can be saved and deleted; messages can be changed.
async function keeps(visit, picture) {
  const { page, last } = visit;
  for (const topic of ["First", "Second"]) {
    await visit.answer({ text: `About ${topic}.` });
    await page.locator("#new").click();
    await visit.say(`${topic} question`);
    await visit.ended();
  }
  await page.reload();
  const entry = (title) => page.locator("#chat-list li", { hasText: title });
  await entry("First question").locator(".title").click();
  await last.getByText("About First.").waitFor();
  await picture("chats");
  await isAccessible(visit, "chats");

  await entry("First question").getByRole("button", { name: "Rename" }).click();
  await page.locator("#chat-list input").fill("Renamed");
  await page.keyboard.press("Enter");
  await entry("Renamed").hover();
  const saved = async (name) => {
    const [download] = await Promise.all([
      page.waitForEvent("download"), entry("Renamed").getByRole("button", { name }).click(),
    ]);
    return readFileSync(await download.path(), "utf8");
  };
  assert.match(await saved("Save as Markdown"), /^# Renamed\n\n\*\*You\*\*\n\nFirst question\n\n---\n\n\*\*Model\*\*\n\nAbout First\./);
  assert.equal(JSON.parse(await saved("Save as JSON")).messages.length, 2);

  await visit.answer({ text: "Changed." });
  await last.getByRole("button", { name: "Regenerate" }).click();
  await last.getByText("Changed.").waitFor();
  await visit.ended();
  await page.locator(".message.user").getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.locator("#input").inputValue(), "First question");
  await visit.say("Another question");
  await visit.ended();
  assert.equal(await visit.messages(), 2);

  page.on("dialog", (dialog) => dialog.accept());
  await entry("Renamed").getByRole("button", { name: "Delete" }).click();
  await entry("Renamed").waitFor({ state: "detached" });
  assert.equal(await visit.messages(), 0);
  await page.reload();
  await entry("Second question").waitFor();
  assert.equal(await page.locator("#chat-list li").count(), 1);
}

/// In the page: a browser that takes longer to delete than the page waits until it keeps an answer again.
function slowDeletion() {
  const now = IDBObjectStore.prototype.delete;
  IDBObjectStore.prototype.delete = function (key) {
    const request = now.call(this, key);
    const late = {};
    request.onsuccess = () => setTimeout(() => late.onsuccess(), 1200);
    return late;
  };
}

/// What is deleted while it is written stays away; what the page left while it was written is cut off.
async function leaves(visit) {
  const { page, last } = visit;
  await visit.setting("max_tokens", "900");
  await visit.setting("temperature", "1.6");
  page.on("dialog", (dialog) => dialog.accept());
  await page.addInitScript(slowDeletion);
  const long = "Tell me a long story about two friends. Do not stop.";
  let release;
  await page.route("**/v1/chat/completions", (route) => new Promise((resolve) => { release = resolve; }).then(() => route.abort()));
  await visit.say(long);
  await page.locator("#chat-list li").waitFor({ state: "attached", timeout: 2000 }).catch(() => {});
  await page.reload();
  release();
  await page.locator("#chat-list .title").click();
  await last.getByText("The connection ended").waitFor();
  await visit.asked();
  await last.getByRole("button", { name: "Retry" }).click();
  await begun(visit);
  await page.locator("#chat-list li").getByRole("button", { name: "Delete" }).click();
  await page.locator("#chat-list li").waitFor({ state: "detached" });
  await page.reload();
  await page.waitForTimeout(300);
  assert.equal(await page.locator("#chat-list li").count(), 0);
}

/// Text files go with a message; others are refused by name.
async function attaches(visit) {
  const { page } = visit;
  const text = { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("a ``` b\n") };
  const other = { name: "data.bin", mimeType: "application/octet-stream", buffer: Buffer.from([0x89, 0x50, 0xff, 0]) };
  await page.locator("#file").setInputFiles([text, other]);
  await page.locator("#status", { hasText: "data.bin is not a text file" }).waitFor();
  assert.equal(await page.locator("#files .file").count(), 1);
  await visit.answer({ text: "Read." });
  const [asked] = await Promise.all([page.waitForRequest("**/v1/chat/completions"), visit.say("What is in it?")]);
  assert.equal(asked.postDataJSON().messages.at(-1).content, "notes.txt:\n````\na ``` b\n\n````\n\nWhat is in it?");
  await visit.ended();
  assert.match(await page.locator(".message.user").textContent(), /notes\.txt/);
  assert.equal(await page.locator("#files .file").count(), 0);
}

/// Drops a file on the conversation, or pastes it; whether the page took what the browser told it.
function gives({ page }, how, name, type, bytes) {
  return page.evaluate(([how, name, type, bytes]) => {
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array(bytes)], name, { type }));
    const about = { bubbles: true, cancelable: true };
    if (how === "paste") {
      const pasted = new ClipboardEvent("paste", { clipboardData: data, ...about });
      return [!document.getElementById("input").dispatchEvent(pasted)];
    }
    const target = document.getElementById("messages");
    // A browser opens what is dropped where nothing takes it.
    const over = new DragEvent("dragover", { dataTransfer: data, ...about });
    const dropped = new DragEvent("drop", { dataTransfer: data, ...about });
    return [over, dropped].map((event) => !target.dispatchEvent(event));
  }, [how, name, type, [...bytes]]);
}

/// Pictures are chosen, dropped and pasted, shown, sent as data URLs, kept, and read by the model.
async function showsPictures(visit, picture) {
  const { page, last } = visit;
  const file = (name) => readFileSync(`${fixtures}/${name}.png`);
  await visit.setting("max_tokens", "8");
  await page.locator("#file").setInputFiles([{ name: "kept.png", mimeType: "image/png", buffer: file("kept") }]);
  await page.locator("#files img").first().waitFor();
  assert.deepEqual(await gives(visit, "drop", "small.png", "image/png", file("small")), [true, true]);
  await page.locator("#files img").nth(1).waitFor();
  assert.deepEqual(await gives(visit, "paste", "large.png", "image/png", file("large")), [true]);
  await page.locator("#files img").nth(2).waitFor();
  await gives(visit, "drop", "broken.png", "image/png", [0x89, 0x50, 0xff, 0]);
  await page.locator("#status", { hasText: "broken.png is a picture that cannot be read" }).waitFor();
  await page.locator("#files").getByRole("button", { name: "Leave out small.png" }).click();
  await isAccessible(visit, "pictures, chosen");
  const [asked] = await Promise.all([page.waitForRequest("**/v1/chat/completions"), visit.say("What is it?")]);
  const { content } = asked.postDataJSON().messages.at(-1);
  const url = (name) => `data:image/png;base64,${file(name).toString("base64")}`;
  assert.deepEqual(content, [
    { type: "image_url", image_url: { url: url("kept") } },
    { type: "image_url", image_url: { url: url("large") } },
    { type: "text", text: "What is it?" },
  ]);
  await last.locator(".facts").waitFor({ timeout: 20_000 });
  await visit.ended();
  assert.equal(await page.locator(".message .error").count(), 0);
  // 20 and 14 tokens of pictures, and words.
  assert.match(await last.locator(".facts").textContent(), /prompt (3[4-9]|[4-9]\d)/);
  const widths = () => page.locator(".message.user img").evaluateAll((all) => all.map((one) => one.naturalWidth));
  assert.deepEqual(await widths(), [40, 101]);
  await picture("pictures");
  await isAccessible(visit, "pictures");
  await page.reload();
  await page.locator("#chat-list .title").click();
  await last.locator(".facts").waitFor();
  assert.deepEqual(await widths(), [40, 101]);
  await page.locator(".message.user").getByRole("button", { name: "Edit" }).click();
  assert.equal(await page.locator("#files img").count(), 2);
}

/// Where the model reads none, the page says so.
async function refusesPictures(visit) {
  const { page } = visit;
  await page.locator("#model", { hasText: "demo" }).waitFor({ state: "attached" });
  await gives(visit, "paste", "kept.png", "image/png", readFileSync(`${fixtures}/kept.png`));
  await page.locator("#status", { hasText: "kept.png is a picture, and this model reads none" }).waitFor();
  assert.equal(await page.locator("#files img").count(), 0);
}

/// A text file that is dropped on the conversation is attached.
async function takesDrops(visit) {
  const { page } = visit;
  const drop = (name, type, bytes) => gives(visit, "drop", name, type, bytes);
  assert.deepEqual(await drop("dropped.md", "text/markdown", Buffer.from("# Grüße\n")), [true, true]);
  await page.locator("#files .file", { hasText: "dropped.md" }).waitFor();
  await drop("data.bin", "application/octet-stream", [0x89, 0x50, 0xff, 0]);
  await page.locator("#status", { hasText: "data.bin is not a text file" }).waitFor();
  assert.equal(await page.locator("#files .file").count(), 1);
  await visit.answer({ text: "Read." });
  const [asked] = await Promise.all([page.waitForRequest("**/v1/chat/completions"), visit.say("Read it")]);
  assert.match(asked.postDataJSON().messages.at(-1).content, /^dropped\.md:\n```\n# Grüße\n/);
  await visit.ended();
}

/// Everything can be reached by the keyboard; settings stay.
async function takesKeys(visit) {
  const { page } = visit;
  const names = [];
  await page.locator("body").press("Tab");
  for (let step = 0; step < 12; step++) {
    names.push(await page.evaluate(() => document.activeElement.id || document.activeElement.className));
    await page.keyboard.press("Tab");
  }
  for (const id of ["show-chats", "new", "show-engine", "show-settings", "messages", "attach", "input"]) {
    assert.ok(names.includes(id), `${id} is not reached: ${names}`);
  }
  await page.locator("#input").focus();
  await page.keyboard.type("one");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("two");
  assert.equal(await page.locator("#input").inputValue(), "one\ntwo");
  await visit.setting("max_tokens", "77");
  await page.reload();
  await page.locator("#show-settings").click();
  assert.equal(await page.locator("#max_tokens").inputValue(), "77");
}

/// What would remove later turns asks first; asking the last answer again does not.
async function asksBeforeCutting(visit) {
  const { page } = visit;
  for (const [question, text] of [["One?", "First."], ["Two?", "Second."], ["Three?", "Third."]]) {
    await visit.answer({ text });
    await visit.say(question);
    await visit.last.getByText(text).waitFor();
    await visit.ended();
  }
  const said = [];
  let agrees = false;
  page.on("dialog", (dialog) => { said.push(dialog.message()); return agrees ? dialog.accept() : dialog.dismiss(); });
  await page.getByRole("button", { name: "Regenerate" }).nth(0).click();
  await page.getByRole("button", { name: "Edit" }).nth(1).click();
  assert.equal(await visit.messages(), 6);
  assert.deepEqual(said, ["This removes 2 later questions and their answers.", "This removes a later question and its answer."]);
  await page.getByRole("button", { name: "Regenerate" }).nth(2).click();
  await visit.ended();
  assert.equal(said.length, 2);
  agrees = true;
  await page.getByRole("button", { name: "Regenerate" }).nth(0).click();
  await page.waitForFunction(() => document.querySelectorAll(".message").length === 2);
}

/// While an answer is written: what the reader folds and selects stays, and a page that goes leaves what there is.
async function keepsWhatIsThere(visit) {
  const { page, last } = visit;
  // Pieces come as the test says: the network's answer is made in the page.
  await page.evaluate(() => {
    const ask = window.fetch;
    window.fetch = (url, options) => String(url).endsWith("chat/completions") ? Promise.resolve(new Response(new ReadableStream({
      start(stream) {
        window.piece = (delta) => stream.enqueue(new TextEncoder().encode(
          `data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] })}\n\n`));
      },
    }), { headers: { "content-type": "text/event-stream" } })) : ask(url, options);
  });
  const piece = (delta) => page.evaluate((delta) => window.piece(delta), delta);
  await visit.say("Think.");
  await page.waitForFunction(() => window.piece);
  await piece({ reasoning_content: "Some thoughts" });
  await last.locator("details[open]").waitFor();
  await last.locator("summary").click();
  await piece({ reasoning_content: ", and more" });
  await last.getByText("and more").waitFor({ state: "attached" });
  assert.equal(await last.locator("details[open]").count(), 0, "it was folded");
  await last.locator("summary").click();
  await piece({ content: "The first paragraph.\n\nThe second" });
  await last.getByText("The second").waitFor();
  assert.equal(await last.locator("details[open]").count(), 1, "it was opened");
  const selected = () => page.evaluate(() => String(getSelection()));
  await page.evaluate(() => getSelection().selectAllChildren(document.querySelector(".message.assistant .body p")));
  assert.equal(await selected(), "The first paragraph.");
  await page.waitForTimeout(600);
  await piece({ content: " one grows." });
  await last.getByText("The second one grows.").waitFor();
  assert.equal(await selected(), "The first paragraph.");
  await page.waitForTimeout(200);
  await page.reload();
  await page.locator("#chat-list .title").click();
  await last.getByText("The second one grows.").waitFor();
  assert.equal(await page.getByRole("button", { name: "Retry" }).count(), 1);
}

const narrow = { width: 360, height: 740, phone: true };
export const checks = [
  { name: "light", screen: { width: 1120, height: 700 }, check: talks },
  { name: "dark", screen: { width: 1280, height: 720, scheme: "dark" }, check: talks },
  { name: "phone", screen: narrow, check: talks },
  { name: "stop", check: stops },
  { name: "follow", check: follows },
  { name: "new", check: begins },
  { name: "failures", check: fails },
  { name: "markdown", check: renders },
  { name: "code and math", screen: { width: 1280, height: 1400 }, check: showsCodeAndMath },
  { name: "code and math, dark", screen: { width: 1280, height: 1400, scheme: "dark" }, check: showsCodeAndMath },
  { name: "blocks", check: drawsBlocksOnce },
  { name: "conversations", check: keeps },
  { name: "leaving", check: leaves },
  { name: "cutting", check: asksBeforeCutting },
  { name: "writing", check: keepsWhatIsThere },
  { name: "files", check: attaches },
  { name: "drops", check: takesDrops },
  { name: "pictures", check: showsPictures, served: "seeing" },
  { name: "no pictures", check: refusesPictures },
  { name: "keyboard", check: takesKeys },
];
