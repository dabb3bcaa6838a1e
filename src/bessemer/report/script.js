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
  let level = 2;

  const ink = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

  function traces(figure) {
    return figure.traces.map(({ ink: name, levels, ...trace }) => {
      const color = ink(name);
      const shown = { ...trace, ...(levels ? levels[level] : {}), marker: { ...trace.marker, color } };
      return trace.type === "bar" ? shown : { ...shown, line: { simplify: false, ...trace.line, color } };
    });
  }

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
    if (ownAxes(group) || axis === "linear") return {};
    const { clipmin, clipmax } = xaxis.autorangeoptions;
    return { type: "log", tickformat: "~s", dtick: clipmax / clipmin < 5000 ? "D2" : 1 };
  }

  function layout(figure) {
    const { xaxis, yaxis, ...more } = figure.layout;
    const legend = figure.traces.length > 1;
    const unit = ownAxes(figure.group) ? {} : { unifiedhovertitle: { text: `${figure.group === "tokens" ? "tokens" : "step"} %{x}` } };
    return {
      ...more,
      autosize: true,
      uirevision: axis, // a zoom lasts while colours or smoothing change
      paper_bgcolor: ink("paper"), plot_bgcolor: ink("paper"),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink("soft") },
      margin: { l: 76, r: 10, t: legend ? 34 : 10, b: 44 },
      xaxis: { nticks: 8, ...axisStyle({ ...xaxis, ...scale(figure), ...unit }), showgrid: false, showline: true, spikethickness: 1, spikedash: "solid", spikecolor: ink("rule") },
      yaxis: { nticks: 7, ...axisStyle(yaxis) },
      showlegend: legend,
      legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", font: { color: ink("ink") }, bgcolor: "rgba(0,0,0,0)" },
      hovermode: more.hovermode ?? "x unified",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: ink("soft"), activecolor: ink("ink") },
      hoverlabel: { bgcolor: ink("paper"), bordercolor: ink("rule"), font: { color: ink("ink"), size: 12 } },
      // A finger that moves over a curve scrolls the page.
      dragmode: coarse.matches ? false : "zoom",
      shapes: figure.shapes.map(({ ink: name, dash, ...shape }) => ({ ...shape, line: { color: ink(name), width: 1, dash } })),
    };
  }

  const canvases = () => [...document.querySelectorAll(".canvas[data-figure]")].filter((place) => figures[place.dataset.figure]);

  function draw() {
    const config = { responsive: true, displaylogo: false, showTips: false, modeBarButtons: [["toImage", "resetScale2d"]], displayModeBar: coarse.matches ? false : "hover" };
    return Promise.all(canvases().map(async (place) => {
      const figure = figures[place.dataset.figure];
      await Plotly.react(place, traces(figure), layout(figure), config);
      if (!place.dataset.linked) link(place, figure);
    }));
  }

  // Curves over the steps zoom together: a spike of the loss is looked up in the gradient norm below it.
  let following = false;
  function link(place, figure) {
    place.dataset.linked = "yes";
    if (figure.group !== "steps") return;
    place.on("plotly_relayout", async (change) => {
      const from = change["xaxis.range[0]"];
      const reset = change["xaxis.autorange"];
      if (following || (from === undefined && !reset)) return;
      following = true;
      const update = reset ? { "xaxis.autorange": true } : { "xaxis.range": [from, change["xaxis.range[1]"]] };
      const others = canvases().filter((other) => other !== place && figures[other.dataset.figure].group === "steps");
      await Promise.all(others.map((other) => Plotly.relayout(other, update)));
      following = false;
    });
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
      choice.addEventListener("change", () => { axis = choice.value; draw(); });
    }
    const slider = document.getElementById("smoothing");
    const labels = JSON.parse(slider.dataset.labels);
    const slid = () => { level = Number(slider.value); slider.nextElementSibling.textContent = labels[level]; };
    slid();
    slider.addEventListener("input", () => { slid(); draw(); });
  }

  // The link of the section one reads is marked, and on a phone brought into view.
  function reading() {
    const links = new Map([...document.querySelectorAll("nav ol a")].map((a) => [a.hash.slice(1), a]));
    const sections = [...links.keys()].map((id) => document.getElementById(id));
    let current = null;
    const mark = () => {
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
      draw();
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
})();
