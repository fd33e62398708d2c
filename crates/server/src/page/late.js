// Libraries that are fetched when the first element needs them, so that a page without such elements does not wait.

// Returns what changes an element, now or once the library is there. Where it cannot be fetched elements stay as they are.
export function late(load, change) {
  let library = null;
  let waiting = null;
  const arrived = (loaded) => {
    library = loaded;
    for (const element of waiting) change(library, element);
    waiting = null;
  };
  return (element) => {
    if (library) return change(library, element);
    if (waiting) return waiting.push(element);
    waiting = [element];
    load().then(arrived, () => { waiting = null; });
  };
}
