"use strict";
// Elements, number formats and the two kinds of chart. Everything that comes from the data is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// ---------------------------------------------------------------------------------------------------------------- formats

function trimZeros(text) { return text.includes(".") ? text.replace(/\.?0+$/, "") : text; }

function fmt(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return trimZeros((value / 1e9).toFixed(2)) + "G";
  if (size >= 1e6) return trimZeros((value / 1e6).toFixed(2)) + "M";
  if (size >= 1e4) return trimZeros((value / 1e3).toFixed(1)) + "k";
  if (size >= 100) return trimZeros(value.toFixed(1)).replace("-", "−");
  if (size >= 1e-3) return trimZeros(value.toPrecision(3)).replace("-", "−");
  return value.toExponential(1).replace(".0e", "e").replace("e-", "e−").replace(/^-/, "−");
}
const fmt2 = (value) => isNumber(value) ? value.toFixed(2).replace("-", "−") : "–";
const signed = (value) => isNumber(value) ? (value > 0 ? "+" : "") + fmt2(value) : "–";

function fmtTime(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 0.1 && seconds > 0) return fmt(seconds * 1000) + " ms";
  if (seconds < 59.95) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${pad(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h ${pad(Math.floor(whole % 3600 / 60))}m`;
  return `${Math.floor(whole / 86400)}d ${pad(Math.floor(whole % 86400 / 3600))}h`;
}

// ------------------------------------------------------------------------------------------------------------------ scales

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((candidate) => candidate >= raw * 0.999);
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return { ticks, step };
}
function tickText(value, step, top) {
  if (Math.abs(value) < step * 1e-6) return "0";
  if (top >= 1e4 || top < 1e-3) return fmt(value);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (Math.abs(step / 10 ** Math.floor(Math.log10(step)) - 2.5) < 1e-6 ? 1 : 0));
  return value.toFixed(decimals).replace("-", "−");
}

function valueRange(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const value of list) if (isNumber(value)) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) return [0, 1];
  // differences of rounding size would need ticks finer than a double can count
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { const pad = Math.abs(low) * 0.1 || 1; return [low - (low >= 0 && low - pad < 0 ? low : pad), high + pad]; }
  // a zero line near the data is worth showing
  if (low > 0 && low < (high - low) * 0.6) low = 0;
  return [low, high];
}

function smooth(values) {
  const sigma = Math.min(Math.max(values.length / 40, 1), 50), reach = Math.ceil(sigma * 2.5);
  return values.map((_, i) => {
    let sum = 0, weight = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
      if (!isNumber(values[j])) continue;
      const w = Math.exp(-((i - j) ** 2) / (2 * sigma * sigma));
      sum += w * values[j]; weight += w;
    }
    return weight ? sum / weight : null;
  });
}

// Path through the points, broken at missing values; at most two points a pixel, so long runs stay light.
function pathOf(xs, ys, sx, sy, pixels) {
  const size = Math.ceil(xs.length / Math.max(pixels, 1));
  let path = "", pen = false;
  const put = (i) => { path += (pen ? "L" : "M") + sx(xs[i]).toFixed(1) + " " + sy(ys[i]).toFixed(1); pen = true; };
  for (let start = 0; start < xs.length; start += size) {
    let low = -1, high = -1;
    for (let i = start; i < Math.min(start + size, xs.length); i++) {
      if (!isNumber(ys[i])) { if (size === 1) pen = false; continue; }
      if (low < 0 || ys[i] < ys[low]) low = i;
      if (high < 0 || ys[i] > ys[high]) high = i;
    }
    if (low < 0) continue;
    put(Math.min(low, high));
    if (low !== high) put(Math.max(low, high));
  }
  return path;
}

// ----------------------------------------------------------------------------------------------------------------- tooltip

const tip = document.getElementById("tip");
function showTip(event, ...content) {
  tip.replaceChildren(...content.filter((part) => part));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  let left = event.clientX + gap, top = event.clientY + gap;
  if (left + box.width > innerWidth - 8) left = event.clientX - box.width - gap;
  if (top + box.height > innerHeight - 8) top = event.clientY - box.height - gap;
  tip.style.left = Math.max(8, left) + "px";
  tip.style.top = Math.max(8, top) + "px";
}
const hideTip = () => { tip.hidden = true; };
const tipRow = (name, value) => h("div", { class: "tip-row" }, h("span", {}, name), h("b", {}, value));

// ------------------------------------------------------------------------------------------------------------------ charts

// Draws again whenever its width changes; `draw(width)` returns an svg.
// Drawing waits for the next frame: a change of size inside the observer's own callback would be reported as an error.
const resized = new ResizeObserver((entries) => requestAnimationFrame(() => { for (const entry of entries) entry.target.redraw(); }));
function responsive(draw) {
  const box = h("div", {});
  let width = 0;
  box.redraw = () => {
    const now = Math.floor(box.clientWidth);
    if (now > 40 && now !== width) { width = now; box.replaceChildren(draw(now)); }
  };
  resized.observe(box);
  return box;
}

function frame(width, height, margin, range, xRange, yTicks, xTicks) {
  const plotW = width - margin.left - margin.right, plotH = height - margin.top - margin.bottom;
  const sx = (x) => margin.left + (xRange[1] === xRange[0] ? plotW / 2 : (x - xRange[0]) / (xRange[1] - xRange[0]) * plotW);
  const sy = (y) => margin.top + plotH - (y - range[0]) / (range[1] - range[0]) * plotH;
  const svg = s("svg", { width, height, role: "img" });
  const { ticks, step } = niceTicks(range[0], range[1], yTicks), top = Math.max(Math.abs(range[0]), Math.abs(range[1]));
  for (const tick of ticks) {
    svg.append(s("line", { class: "grid-line", x1: margin.left, x2: width - margin.right, y1: sy(tick), y2: sy(tick) }),
      s("text", { x: margin.left - 7, y: sy(tick) + 4, "text-anchor": "end" }, tickText(tick, step, top)));
  }
  svg.append(s("line", { class: "axis-line", x1: margin.left, x2: width - margin.right, y1: margin.top + plotH, y2: margin.top + plotH }));
  const along = xRange[1] === xRange[0] ? [xRange[0]] : niceTicks(xRange[0], xRange[1], xTicks).ticks.filter(Number.isInteger);
  for (const tick of along) svg.append(s("text", { x: sx(tick), y: height - margin.bottom + 16, "text-anchor": "middle" }, String(tick)));
  return { svg, sx, sy, plotW, plotH };
}

// lines: {name, xs, ys, color, width, opacity, dots, format}
function lineChart({ lines, height, compact, label, xRange, xName, fromZero }) {
  return responsive((width) => {
    let range = valueRange(lines.map((line) => line.ys));
    if (fromZero && range[0] > 0) range[0] = 0;
    const pad = (range[1] - range[0]) * 0.05;
    range = [range[0] === 0 ? 0 : range[0] - pad, range[1] + pad];
    const { ticks, step } = niceTicks(range[0], range[1], compact ? 4 : 5);
    const longest = Math.max(...ticks.map((tick) => tickText(tick, step, Math.max(Math.abs(range[0]), Math.abs(range[1]))).length), 1);
    const margin = { left: Math.max(compact ? 30 : 38, 12 + longest * 6.7), right: compact ? 8 : 14, top: 8, bottom: compact ? 22 : 40 };
    const { svg, sx, sy, plotW, plotH } = frame(width, height, margin, range, xRange, compact ? 4 : 5, compact ? 4 : Math.max(4, width / 90));
    svg.setAttribute("aria-label", label);
    if (!compact) svg.append(s("text", { x: margin.left + plotW / 2, y: height - 4, "text-anchor": "middle" }, xName));
    for (const line of lines) {
      svg.append(s("path", { d: pathOf(line.xs, line.ys, sx, sy, plotW), fill: "none", stroke: line.color, "stroke-width": line.width || 1.5,
        "stroke-opacity": line.opacity || 1, "stroke-linejoin": "round", "stroke-linecap": "round" }));
      const single = line.ys.filter(isNumber).length === 1;
      if (line.dots || single) line.xs.forEach((x, i) => {
        if (isNumber(line.ys[i])) svg.append(s("circle", { cx: sx(x), cy: sy(line.ys[i]), r: 3.5, fill: line.color, stroke: "var(--card)", "stroke-width": 1.5 }));
      });
    }
    const cross = s("g", { visibility: "hidden" });
    svg.append(cross, s("rect", { x: margin.left, y: 0, width: plotW, height, fill: "transparent",
      onpointermove: (event) => {
        const at = xRange[0] + (event.clientX - svg.getBoundingClientRect().left - margin.left) / plotW * (xRange[1] - xRange[0]);
        let best = null;
        for (const line of lines) for (const x of line.xs) if (best === null || Math.abs(x - at) < Math.abs(best - at)) best = x;
        const marks = [s("line", { class: "cross", x1: sx(best), x2: sx(best), y1: margin.top, y2: margin.top + plotH })], rows = [];
        for (const line of lines) {
          const i = line.xs.indexOf(best);
          if (i < 0 || !isNumber(line.ys[i])) continue;
          marks.push(s("circle", { cx: sx(best), cy: sy(line.ys[i]), r: 3.5, fill: line.color, stroke: "var(--card)", "stroke-width": 1.5 }));
          rows.push(tipRow(line.name, fmt(line.ys[i])));
        }
        cross.replaceChildren(...marks);
        cross.setAttribute("visibility", "visible");
        showTip(event, h("b", {}, `step ${best}`), ...rows);
      },
      onpointerleave: () => { cross.setAttribute("visibility", "hidden"); hideTip(); } }));
    return svg;
  });
}

// parts: [{name, color, ys}] stacked; neighbouring steps are averaged once bars would be thinner than a few pixels
function stackedBars({ steps, parts, height, label }) {
  return responsive((width) => {
    const margin = { left: 46, right: 14, top: 8, bottom: 40 }, room = width - margin.left - margin.right;
    const size = Math.ceil(steps.length / Math.max(1, Math.floor(room / 5))), bars = [];
    for (let start = 0; start < steps.length; start += size) {
      const end = Math.min(start + size, steps.length);
      bars.push({ from: steps[start], to: steps[end - 1], values: parts.map((part) => part.ys.slice(start, end).reduce((a, b) => a + b, 0) / (end - start)) });
    }
    const top = Math.max(...bars.map((bar) => bar.values.reduce((a, b) => a + b, 0)), 1e-9) * 1.04;
    const xRange = [steps[0] - 0.5, steps[steps.length - 1] + 0.5];
    const { svg, sx, sy, plotW, plotH } = frame(width, height, margin, [0, top], xRange, 4, Math.max(4, width / 90));
    svg.setAttribute("aria-label", label);
    svg.append(s("text", { x: margin.left + plotW / 2, y: height - 4, "text-anchor": "middle" }, size > 1 ? `step (bars average ${size} steps), seconds` : "step, seconds"));
    for (const bar of bars) {
      const left = sx(bar.from - 0.5), full = sx(bar.to + 0.5) - left, gap = Math.min(full * 0.2, 3), w = Math.min(full - gap, 42);
      const group = s("g", {});
      let base = 0;
      bar.values.forEach((value, k) => {
        if (value <= 0) return;
        group.append(s("rect", { x: left + (full - w) / 2, width: w, y: sy(base + value), height: Math.max(sy(base) - sy(base + value), 0.3), fill: parts[k].color }));
        base += value;
      });
      group.append(s("rect", { x: left, width: full, y: margin.top, height: plotH, fill: "transparent",
        onpointermove: (event) => showTip(event, h("b", {}, bar.from === bar.to ? `step ${bar.from}` : `steps ${bar.from}–${bar.to}`),
          ...bar.values.map((value, k) => value > 0 && tipRow(parts[k].name, fmtTime(value))), tipRow("total", fmtTime(base))),
        onpointerleave: hideTip }));
      svg.append(group);
    }
    return svg;
  });
}
