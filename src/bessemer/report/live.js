// Keeps the live page up to date: asks for what has changed, and puts it in place without disturbing what one reads.
(() => {
  "use strict";
  const POLL = 1800; // milliseconds between two looks: the server takes a small share of a core
  const known = {};
  const view = new URLSearchParams(location.search);
  view.delete("token");
  let version = "", live = false, last = 0, lost = false, timer = null;

  const parse = (id) => JSON.parse(document.getElementById(id).textContent);
  const heartbeat = document.getElementById("heartbeat");

  function ago(seconds) {
    if (seconds < 90) return `${Math.max(Math.round(seconds), 0)} s`;
    return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
  }

  function tick() {
    const shown = lost ? "· no answer from bessemer watch: was it stopped?" : live ? `· last line ${ago(Date.now() / 1000 - last)} ago` : "";
    if (heartbeat.textContent !== shown) heartbeat.textContent = shown;
    heartbeat.classList.toggle("far", lost);
  }

  // What one has unfolded stays so, by its heading and its place among those of the same one.
  const folds = (place) => {
    const seen = {};
    return [...place.querySelectorAll("details")].map((fold) => {
      const row = fold.closest("tr")?.previousElementSibling?.id ?? "";
      const name = `${row} ${fold.querySelector("summary").textContent}`;
      seen[name] = (seen[name] ?? 0) + 1;
      return [`${name} ${seen[name]}`, fold];
    });
  };

  function replace(place, html) {
    const open = new Set(folds(place).filter(([, fold]) => fold.open).map(([name]) => name));
    place.innerHTML = html;
    for (const [name, fold] of folds(place)) fold.open = open.has(name);
    const log = place.querySelector("pre.log");
    if (log) log.scrollTop = log.scrollHeight;
  }

  const frameOf = (figures) => Object.keys(figures).join();
  let frame = "";

  function show(state) {
    version = state.version;
    if (!state.fragments) return;
    ({ live, last } = state);
    for (const [id, html] of Object.entries(state.fragments)) {
      const place = document.getElementById(`live-${id}`);
      // Curves are redrawn in place; their frame is made anew only when there are others.
      if (known[id] === html || (id === "frame" && frame === frameOf(state.figures))) continue;
      replace(place, html);
      known[id] = html;
      if (id === "frame") document.dispatchEvent(new CustomEvent("bessemer:frame"));
    }
    frame = frameOf(state.figures);
    const links = state.sections.map(([id, title]) => `${id} ${title}`).join();
    if (links !== known.links) {
      known.links = links;
      const list = document.getElementById("sections");
      list.replaceChildren(...state.sections.map(([id, title]) => {
        const item = document.createElement("li"), link = document.createElement("a");
        link.href = `#${id}`;
        link.textContent = title;
        item.append(link);
        return item;
      }));
      document.dispatchEvent(new CustomEvent("bessemer:sections"));
    }
    document.dispatchEvent(new CustomEvent("bessemer:figures", { detail: state.figures }));
  }

  async function ask() {
    clearTimeout(timer);
    try {
      const query = new URLSearchParams(view);
      if (version) query.set("since", version);
      const answer = await fetch(`state?${query}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const state = await answer.json();
      lost = false;
      show(state);
    } catch {
      lost = true;
    }
    tick();
    if (!document.hidden) timer = setTimeout(ask, POLL);
  }

  // A page that nobody looks at costs nothing.
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });

  document.addEventListener("DOMContentLoaded", () => {
    if (location.search.includes("token=")) {
      const rest = view.toString();
      history.replaceState(null, "", rest ? `?${rest}` : "."); // the token is in a cookie now, not in a picture of the screen
    }
    ({ version, live, last } = parse("live"));
    frame = frameOf(parse("figures"));
    for (const place of document.querySelectorAll("[id^=live-]")) known[place.id.slice(5)] = place.innerHTML;
    const log = document.querySelector("pre.log");
    if (log) log.scrollTop = log.scrollHeight;
    setInterval(tick, 1000);
    tick();
    ask();
  });
})();
