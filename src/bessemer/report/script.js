// Draws the figures in the colours of the theme, and again when the theme or a control changes.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const button = document.getElementById("theme");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);

  const stored = document.getElementById("figures");
  if (!stored || typeof Plotly === "undefined") return;
  const figures = JSON.parse(stored.textContent);
  const labels = JSON.parse(document.getElementById("smoothing-labels").textContent);
  const smoothing = document.getElementById("smoothing");
  const logx = document.getElementById("logx");
  smoothing.addEventListener("input", draw);
  logx.addEventListener("change", draw);

  function colour(name) {
    return getComputedStyle(root).getPropertyValue("--" + name).trim();
  }

  function trace(given) {
    const { ink, levels, ...shown } = given;
    const points = levels ? levels[Number(smoothing.value)] : {};
    return {
      ...shown, ...points,
      line: { ...given.line, color: colour(ink) },
      marker: { ...given.marker, color: colour(ink) },
    };
  }

  function layout(figure, narrow) {
    const axis = {
      gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: true,
      tickfont: { color: colour("soft"), size: 11 }, title: { standoff: 8 },
    };
    const merged = (more) => ({
      ...axis, ...more, title: { ...axis.title, ...more.title, font: { color: colour("soft"), size: 11 } },
    });
    const xaxis = merged(figure.layout.xaxis);
    if (logx.checked && figure.group === "steps") xaxis.type = "log";
    return {
      xaxis, yaxis: merged(figure.layout.yaxis),
      shapes: figure.shapes.map(({ ink, dash, ...shape }) => ({ ...shape, line: { color: colour(ink), width: 1, dash } })),
      margin: { l: 48, r: 10, t: 8, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: colour("text"), size: 12 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 } },
      showlegend: figure.traces.length > 1,
      legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", font: { size: 11 } },
      dragmode: narrow ? false : "zoom",
      uirevision: "kept",
    };
  }

  function draw() {
    document.getElementById("smoothing-label").textContent = labels[Number(smoothing.value)];
    for (const place of document.querySelectorAll(".plot")) {
      const figure = figures[Number(place.dataset.figure)];
      const shown = layout(figure, innerWidth < 760);
      if (shown.showlegend) shown.margin.t = 26;
      Plotly.react(place, figure.traces.map(trace), shown, {
        responsive: true, displaylogo: false, displayModeBar: false, doubleClick: "reset",
      });
    }
  }
  draw();
})();
