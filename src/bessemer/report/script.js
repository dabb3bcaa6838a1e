// Draws the figures of the page in the colours of the theme. Everything it shows is data in the page; it asks no network.
(() => {
  "use strict";
  const root = document.documentElement;
  const KEY = "bessemer-theme";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)");

  // Storage may be refused, as for files in some browsers; the choice then lasts as long as the page.
  const remembered = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem(KEY, theme); } catch { /* see above */ } };
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  // At once, before anything is painted, so that the page does not flash.
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();

  let figures = {};
  let axis = "linear";
  let level = 1;
  let zoom = null; // of the figures over the steps, in the axis' own terms
  let stale = new Set(); // canvases whose figure has changed since they were drawn

  const ink = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  // plotly takes <b> and the like in a name for markup
  const plain = (text) => text && text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  function traces(figure) {
    return figure.traces.map(({ ink: name, inks, levels, fillink, ...trace }) => {
      if (inks) return { ...trace, colorscale: inks.map(([at, one]) => [at, ink(one)]), colorbar: colorBar() };
      const color = ink(name);
      const shown = { ...trace, name: plain(trace.name), ...(levels ? levels[Math.min(level, levels.length - 1)] : {}), marker: { ...trace.marker, color } };
      if (fillink) shown.fillcolor = ink(fillink);
      return trace.type === "bar" ? shown : { ...shown, line: { simplify: false, ...trace.line, color } };
    });
  }

  // A heat map's colours are where other figures have their legend, so that the plots line up.
  const colorBar = () => ({
    orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", thickness: 8, len: 0.45, xpad: 0, ypad: 0, outlinewidth: 0, nticks: 5,
    ticklabelposition: "outside top", tickfont: { size: 11, color: ink("soft") },
  });

  function axisStyle(of) {
    return {
      ...of,
      title: { ...of.title, standoff: 8, font: { size: 12, color: ink("soft") } },
      gridcolor: ink("line"), linecolor: ink("rule"), tickcolor: ink("rule"), zeroline: false,
      ticks: "outside", ticklen: 4, fixedrange: coarse.matches, exponentformat: "power", separatethousands: true, automargin: false,
    };
  }

  // Only figures over steps or tokens have the page's choice of axis; the others bring theirs.
  const ownAxes = (group) => group !== "steps" && group !== "tokens";

  function scale({ group, layout: { xaxis } }) {
    const part = zoom && group === "steps" ? { range: zoom, autorange: false } : {};
    if (ownAxes(group) || axis === "linear") return part;
    const { clipmin, clipmax } = xaxis.autorangeoptions;
    return { ...part, type: "log", tickformat: "~s", dtick: clipmax / clipmin < 5000 ? "D2" : 1 };
  }

  function layout(figure) {
    const { xaxis, yaxis, ...more } = figure.layout;
    const legend = figure.traces.length > 1;
    const top = legend || figure.traces[0]?.inks;
    const unit = ownAxes(figure.group) ? {} : { unifiedhovertitle: { text: `${figure.group === "tokens" ? "tokens" : "step"} %{x}` } };
    return {
      ...more,
      autosize: true,
      uirevision: axis, // a zoom lasts while colours or smoothing change
      paper_bgcolor: ink("paper"), plot_bgcolor: ink("paper"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink("soft") },
      margin: { l: 76, r: 10, t: top ? 34 : 10, b: 44 },
      xaxis: { nticks: 8, ...axisStyle({ ...xaxis, ...scale(figure), ...unit }), showgrid: false, showline: true, spikethickness: 1, spikedash: "solid", spikecolor: ink("rule") },
      yaxis: { nticks: 7, ...axisStyle(yaxis) },
      showlegend: legend,
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { color: ink("ink") }, bgcolor: "rgba(0,0,0,0)" },
      hovermode: more.hovermode ?? "x unified",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("soft"), activecolor: ink("ink") },
      hoverlabel: { bgcolor: ink("paper"), bordercolor: ink("rule"), font: { color: ink("ink"), size: 12 } },
      // A finger that moves over a curve scrolls the page.
      dragmode: coarse.matches ? false : "zoom",
      annotations: (more.annotations ?? []).map((note) => ({ bgcolor: ink("paper"), borderpad: 1, ...note })),
      shapes: figure.shapes.map(({ ink: name, dash, ...shape }) => ({ ...shape, line: { color: ink(name), width: 1, dash } })),
    };
  }

  const canvases = () => [...document.querySelectorAll(".canvas[data-figure]")].filter((place) => figures[place.dataset.figure]);

  // Figures that are out of sight are drawn when one scrolls to them.
  const sight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      target.dataset.seen = isIntersecting ? "yes" : "";
      if (isIntersecting && stale.has(target)) drawOne(target);
    }
  }, { rootMargin: "200px" });

  async function drawOne(place) {
    const figure = figures[place.dataset.figure];
    stale.delete(place);
    if (!figure) return;
    const config = { responsive: true, displaylogo: false, showTips: false, modeBarButtons: [["toImage", "resetScale2d"]], displayModeBar: coarse.matches ? false : "hover" };
    await Plotly.react(place, traces(figure), layout(figure), config);
    if (!place.dataset.linked) link(place, figure);
  }

  function draw(all = false) {
    stale = new Set(canvases());
    for (const place of stale) if (!("seen" in place.dataset)) { place.dataset.seen = ""; sight.observe(place); }
    return Promise.all([...stale].filter((place) => all || place.dataset.seen).map(drawOne));
  }

  // Curves over the steps zoom together: a spike of the loss is looked up in the gradient norm below it.
  let following = false;
  function link(place, figure) {
    place.dataset.linked = "yes";
    place.on("plotly_click", ({ points }) => {
      const number = points.map((point) => point.customdata).find((value) => value !== undefined);
      if (number !== undefined) openIncident(number);
    });
    if (figure.group !== "steps") return;
    place.on("plotly_relayout", async (change) => {
      const from = change["xaxis.range[0]"];
      const reset = change["xaxis.autorange"];
      if (following || (from === undefined && !reset)) return;
      following = true;
      zoom = reset ? null : [from, change["xaxis.range[1]"]];
      const update = reset ? { "xaxis.autorange": true } : { "xaxis.range": zoom };
      const drawn = canvases().filter((other) => other !== place && other.data && figures[other.dataset.figure].group === "steps");
      await Promise.all(drawn.map((other) => Plotly.relayout(other, update)));
      following = false;
    });
  }

  function openIncident(number) {
    const row = document.getElementById(`incident-${number}`);
    if (!row) return;
    const under = row.nextElementSibling?.querySelector("details");
    if (under) under.open = true;
    row.scrollIntoView({ block: "center" });
    row.classList.add("shown");
    setTimeout(() => row.classList.remove("shown"), 2500);
  }

  function themeButton() {
    const button = document.getElementById("theme");
    const name = () => { button.textContent = theme() === "dark" ? "Light" : "Dark"; button.setAttribute("aria-label", `Change to the ${button.textContent.toLowerCase()} theme`); };
    const changed = () => { name(); draw(); };
    button.hidden = false;
    name();
    button.addEventListener("click", () => {
      root.dataset.theme = theme() === "dark" ? "light" : "dark";
      remember(root.dataset.theme);
      changed();
    });
    dark.addEventListener("change", changed);
  }

  function controls() {
    const box = document.querySelector(".controls");
    if (!box) return;
    box.hidden = false;
    for (const choice of box.querySelectorAll("input[name=axis]")) {
      choice.checked = choice.value === axis;
      choice.addEventListener("change", () => { axis = choice.value; zoom = null; draw(); });
    }
    const slider = document.getElementById("smoothing");
    const labels = JSON.parse(slider.dataset.labels);
    const slid = () => { level = Number(slider.value); slider.nextElementSibling.textContent = labels[level]; };
    slider.value = level;
    slid();
    slider.addEventListener("input", () => { slid(); draw(); });
  }

  // The link of the section one reads is marked, and on a phone brought into view.
  let marks = null;
  function reading() {
    if (marks) window.removeEventListener("scroll", marks);
    const links = new Map([...document.querySelectorAll("nav ol a")].map((a) => [a.hash.slice(1), a]));
    let current = null;
    const mark = marks = () => {
      const sections = [...links.keys()].map((id) => document.getElementById(id)).filter(Boolean);
      const atEnd = window.innerHeight + window.scrollY >= root.scrollHeight - 2;
      const above = sections.filter((section) => section.getBoundingClientRect().top < window.innerHeight * 0.35);
      const now = (atEnd ? sections : above).at(-1)?.id;
      if (now === current) return;
      links.get(current)?.removeAttribute("aria-current");
      current = now;
      const marked = links.get(current);
      marked?.setAttribute("aria-current", "true");
      const strip = document.querySelector("nav ol");
      if (marked && strip.scrollWidth > strip.clientWidth) strip.scrollLeft = marked.offsetLeft - strip.offsetLeft - 16;
    };
    window.addEventListener("scroll", mark, { passive: true });
    mark();
  }

  // Paper is white and as wide as it is, and what is folded on a screen cannot be unfolded on it.
  function printing() {
    let before = {};
    const size = (paper) => canvases().forEach((place) => {
      const height = place.closest(".wide") ? 300 : 200;
      Plotly.relayout(place, paper ? { width: 640, height, autosize: false } : { width: undefined, height: undefined, autosize: true });
    });
    window.addEventListener("beforeprint", () => {
      before = { theme: root.dataset.theme, closed: [...document.querySelectorAll("details:not([open])")] };
      root.dataset.theme = "light";
      before.closed.forEach((details) => { details.open = true; });
      draw(true);
      size(true);
    });
    window.addEventListener("afterprint", () => {
      if (before.theme) root.dataset.theme = before.theme; else delete root.dataset.theme;
      before.closed.forEach((details) => { details.open = false; });
      draw();
      size(false);
    });
  }

  document.addEventListener("DOMContentLoaded", () => {
    const data = document.getElementById("figures");
    figures = data ? JSON.parse(data.textContent) : {};
    controls();
    themeButton();
    reading();
    printing();
    draw();
  });

  // What a live page changes.
  document.addEventListener("bessemer:figures", ({ detail }) => { figures = detail; draw(); });
  document.addEventListener("bessemer:frame", controls);
  document.addEventListener("bessemer:sections", reading);
})();
