"use strict";
(async () => {
  async function unpacked(id) { // the data and plotly are compressed in the page
    const text = atob(document.getElementById(id).textContent);
    const bytes = new Blob([Uint8Array.from(text, (each) => each.charCodeAt(0))]);
    return new Response(bytes.stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  const report = JSON.parse(await unpacked("data"));
  const root = document.documentElement;
  const boxes = [...document.querySelectorAll("[data-line]")];
  const shown = (line) => boxes[line].checked;
  const touch = matchMedia("(pointer: coarse)").matches;
  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const paint = (value) => (value === "ink" ? colour("ink") : value);
  const drawings = []; // a function for each figure of series: draws it as things now are
  const maps = []; // and for each of labels, which the legend does not concern

  // the theme: the reader's choice, else the system's

  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  let chosen = null;
  try { chosen = localStorage.getItem("feddumap-theme"); } catch { /* no storage: ask the system each time */ }

  function applyTheme() {
    const dark = chosen ? chosen === "dark" : system.matches;
    root.dataset.theme = dark ? "dark" : "light";
    button.setAttribute("aria-pressed", String(dark));
  }

  button.addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("feddumap-theme", chosen); } catch { /* holds for this visit */ }
    applyTheme();
    drawAll();
  });
  system.addEventListener("change", () => { applyTheme(); drawAll(); });
  applyTheme();

  // what all figures share

  function axis(settings) {
    return {
      gridcolor: colour("grid"), linecolor: colour("rule"), tickcolor: colour("rule"), zeroline: false,
      ticks: "outside", ticklen: 4, automargin: true, ...settings,
      title: { standoff: 10, font: { color: colour("quiet") }, ...settings.title },
    };
  }

  function layoutOf(settings) {
    const layout = {
      showlegend: false, hovermode: "closest", dragmode: touch ? false : "zoom", autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 56, r: 10, t: 30, b: 46 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
      hoverlabel: {
        bgcolor: colour("paper"), bordercolor: colour("quiet"), align: "left", namelength: -1,
        font: { color: colour("ink"), size: 12 },
      },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("quiet"), activecolor: colour("ink") },
      ...settings,
    };
    for (const key of Object.keys(layout)) if (/^[xy]axis/.test(key)) layout[key] = axis(layout[key]);
    return layout;
  }

  const config = (name) => ({
    responsive: true, displaylogo: false, displayModeBar: touch ? true : "hover",
    // these and no others: plotly also has one that sends the figure to its makers
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: name },
  });

  const draw = (name, data, layout) => // nothing until plotly is loaded; then everything is drawn
    window.Plotly?.react(`plot-${name}`, data, layoutOf(layout), config(name));
  const drawSeries = () => drawings.forEach((each) => each());
  const drawAll = () => [...drawings, ...maps].forEach((each) => each());

  // figures of lines

  const chosenIn = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;
  const veil = (value, share) => {
    const [r, g, b] = value.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
    return `rgba(${r},${g},${b},${share})`;
  };

  function traces(line, place, chart, x, y, faint, seeds) {
    const table = line[chart.table];
    const ink = paint(line.colour);
    const format = y.percent ? ":.1%" : ":,.4~g";
    const hover = (who) =>
      `<b>${who}</b><br>${x.title}: %{x:,.4~g}<br>${y.title}: %{y${format}}<extra></extra>`;
    const of = (columns, key, more) => ({
      type: "scatter", mode: "lines", x: columns[x.key] ?? [], y: columns[key] ?? [], connectgaps: true,
      meta: { line: place }, uid: `${chart.name}-${place}-${more.part}`, ...more.look,
    });
    const quiet = { hoverinfo: "skip" };
    const found = [];
    if (table.low[y.key] || table.high[y.key]) {
      const edge = { ...quiet, line: { width: 0 } };
      const fill = { ...edge, fill: "tonexty", fillcolor: veil(ink, 0.16) };
      const range = (bound) => ({ ...table.mean, [y.key]: bound[y.key] ?? table.mean[y.key] });
      found.push(of(range(table.low), y.key, { part: "low", look: edge }));
      found.push(of(range(table.high), y.key, { part: "high", look: fill }));
    }
    if (faint && y.key === "smooth" && !table.seeds.length) {
      const look = { ...quiet, line: { color: veil(ink, 0.32), width: 1 } };
      found.push(of(table.mean, "raw", { part: "raw", look }));
    }
    for (const each of table.seeds.filter((track) => seeds || track.going)) {
      // a column that a seed does not have is the same as the mean's
      found.push(of({ ...table.mean, ...each }, y.key, {
        part: `seed-${each.seed}`,
        look: { line: { color: veil(ink, 0.55), width: 1 }, hovertemplate: hover(`${line.label}, seed ${each.seed}`) },
      }));
    }
    const many = table.members > 1 ? `mean of ${table.members} seeds` : "the only finished seed";
    const who = table.seeds.length ? `${line.label}, ${many}` : line.label;
    found.push(of(table.mean, y.key, {
      part: "mean",
      look: {
        mode: "lines+markers", line: { color: ink, width: 2, dash: line.dash },
        marker: { symbol: line.marker, size: 6, maxdisplayed: 8, color: ink }, hovertemplate: hover(who),
      },
    }));
    return found;
  }

  function drawLines(chart) {
    const pick = (side) =>
      chart[side].find((each) => each.key === chosenIn(`${chart.name}-${side}`)) ?? chart[side][0];
    const x = pick("x"), y = pick("y");
    const seeds = document.querySelector(`input[name="${chart.name}-seeds"]`)?.checked ?? false;
    const faint = boxes.filter((box) => box.checked).length <= report.faint;
    const data = report.lines.flatMap((line, place) => {
      const table = line[chart.table];
      const known = [table.mean, ...table.seeds].some((each) => each[y.key]?.some((value) => value !== null));
      return known && shown(place) ? traces(line, place, chart, x, y, faint, seeds) : [];
    });
    draw(chart.name, data, {
      uirevision: `${x.key} ${y.percent ? "accuracy" : y.key}`,
      xaxis: { title: { text: x.title }, rangemode: "tozero" },
      yaxis: {
        title: { text: y.title }, tickformat: y.percent ? ".0%" : "", type: y.log ? "log" : "linear",
        rangemode: chart.name === "cost" ? "tozero" : "normal",
      },
    });
    const file = chart.files[`${x.key} ${y.key}`];
    document.querySelectorAll(`#files-${chart.name} a`).forEach((link) => {
      link.setAttribute("href", `figures/${file}.${link.textContent.toLowerCase()}`);
    });
  }

  for (const chart of report.charts) {
    drawings.push(() => drawLines(chart));
    document.querySelectorAll(`[data-chart="${chart.name}"] input`).forEach((input) => {
      input.addEventListener("change", () => drawLines(chart));
    });
  }

  // what was pruned, and who held which labels

  report.pruning.forEach((figure, number) => {
    drawings.push(() => {
      const data = figure.data.filter((bar) => shown(bar.meta.line)).map((bar) => ({
        ...bar, marker: { ...bar.marker, color: paint(bar.marker.color) },
      }));
      draw(`pruning-${number}`, data, figure.layout);
    });
  });

  report.labels.forEach((figure, number) => {
    const place = document.getElementById(`plot-labels-${number}`);
    place.style.height = `${Math.min(900, Math.max(420, 190 + 9 * figure.rows))}px`;
    maps.push(() => {
      const scale = [[0, colour("low")], [0.5, colour("middle")], [1, colour("high")]];
      const [heat, degrees] = figure.data;
      draw(`labels-${number}`, [{ ...heat, colorscale: scale, xgap: 0.6, ygap: 0.6 }, degrees], figure.layout);
    });
  });

  // the legend

  function count() {
    const number = boxes.filter((box) => box.checked).length;
    document.getElementById("count").textContent = `${number} of ${boxes.length} shown`;
  }

  function choose(test) {
    boxes.forEach((box, line) => { box.checked = test(line); });
    count();
    drawSeries();
  }

  const choices = { all: () => true, none: () => false, best: (line) => report.best.includes(line) };
  document.querySelectorAll("[data-choose]").forEach((each) => {
    each.addEventListener("click", () => choose(choices[each.dataset.choose]));
  });

  function point(line) { // a series is pointed at by making the others faint
    for (const chart of report.charts) {
      for (const drawn of document.querySelectorAll(`#plot-${chart.name} .scatterlayer .trace`)) {
        const own = [...drawn.classList].some((name) => name.startsWith(`trace${chart.name}-${line}-`));
        drawn.style.opacity = line === null || own ? "" : "0.12";
      }
    }
  }

  boxes.forEach((box, line) => {
    const label = box.closest("label");
    box.addEventListener("change", () => { count(); drawSeries(); });
    label.addEventListener("mouseenter", () => point(line));
    label.addEventListener("mouseleave", () => point(null));
    box.addEventListener("focus", () => { if (box.matches(":focus-visible")) point(line); });
    box.addEventListener("blur", () => point(null));
  });
  if (matchMedia("(max-width: 860px)").matches) document.querySelector(".legend").open = false;

  // tables are sorted by their head

  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending" && head.classList.contains("right");
      const up = head.getAttribute("aria-sort") !== "ascending" && !down;
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : up ? "ascending" : "descending");
      const sign = head.getAttribute("aria-sort") === "ascending" ? 1 : -1;
      const value = (row) => row.cells[column].dataset.sort ?? (column ? null : row.cells[0].textContent);
      const rows = [...table.tBodies[0].rows].sort((one, other) => {
        const a = value(one), b = value(other);
        if (a === null || b === null) return (a === null) - (b === null); // what is missing comes last
        return column ? sign * (a - b) : sign * a.localeCompare(b);
      });
      table.tBodies[0].append(...rows);
    }));
  });

  count();
  const plotly = document.createElement("script");
  plotly.textContent = await unpacked("plotly");
  document.head.append(plotly);
  drawAll();
})().catch((error) => {
  const note = document.createElement("p");
  note.className = "missing";
  note.textContent = `This browser cannot draw the interactive figures (${error}): use a newer one.`;
  document.querySelector("header").append(note);
  throw error;
});
