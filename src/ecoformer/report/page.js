"use strict";
(async () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const side = data.side, tokens = side * side, cell = 16;
  const status = document.getElementById("status");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hue = (c) => `hsl(${(360 * c) / data.classes} 65% 55%)`;

  const pixels = async (uri) => {
    const image = new Image();
    await new Promise((loaded) => {
      image.onload = loaded;
      image.src = uri;
    });
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    return { image, width: image.width, read: (y) => context.getImageData(0, y, image.width, 1).data };
  };
  const picture = await pixels(data.picture);
  const layers = await Promise.all(data.layers.map(async (layer) => ({
    ...layer,
    weights: await pixels(layer.weights),
    codes: layer.codes ? await pixels(layer.codes) : null,
  })));

  let token = data.token, depth = 0;
  const bits = (layer, i) => {
    const row = layer.codes.read(i);
    return Array.from({ length: layer.codes.width }, (_, b) => (row[4 * b] > 127 ? 1 : 0));
  };

  const outline = (context) => {
    const [x, y] = [token % side, Math.floor(token / side)];
    for (const [width, ink] of [[10, "#fff"], [5, colour("--mark")]]) {
      context.lineWidth = width;
      context.strokeStyle = ink;
      context.strokeRect(x * cell - 3, y * cell - 3, cell + 6, cell + 6);
    }
  };
  const start = (canvas) => {
    canvas.width = canvas.height = side * cell;
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    return context;
  };

  const drawInput = (canvas) => {
    const context = start(canvas);
    context.drawImage(picture.image, 0, 0, side * cell, side * cell);
    outline(context);
  };
  const drawMap = (canvas, layer) => {
    const context = start(canvas), row = layer.weights.read(token);
    context.globalAlpha = 0.35;
    context.filter = "grayscale(1)";
    context.drawImage(picture.image, 0, 0, side * cell, side * cell);
    context.filter = "none";
    for (let i = 0; i < tokens; i++) {
      context.globalAlpha = Math.sqrt(row[4 * i] / 255);
      context.fillStyle = "#f08c00";
      context.fillRect((i % side) * cell, Math.floor(i / side) * cell, cell, cell);
    }
    context.globalAlpha = 1;
    outline(context);
  };
  const drawCodes = (canvas, layer) => {
    const width = layer.codes.width, across = Math.min(8, width), gap = 2;
    canvas.width = across * (side + gap) - gap;
    canvas.height = Math.ceil(width / across) * (side + gap) - gap;
    const context = canvas.getContext("2d");
    const [ink, paper] = [colour("--text"), colour("--panel")];
    for (let i = 0; i < tokens; i++) {
      bits(layer, i).forEach((bit, b) => {
        context.fillStyle = bit ? ink : paper;
        const [x, y] = [(b % across) * (side + gap), Math.floor(b / across) * (side + gap)];
        context.fillRect(x + (i % side), y + Math.floor(i / side), 1, 1);
      });
    }
  };
  const drawAnswers = (canvas, answers) => {
    const context = start(canvas);
    answers.forEach((answer, i) => {
      const [x, y] = [(i % side) * cell, Math.floor(i / side) * cell];
      const asked = data.target[i] >= 0;
      context.fillStyle = asked ? hue(answer) : colour("--panel");
      context.fillRect(x, y, cell, cell);
      if (asked && answer !== data.target[i]) {
        context.fillStyle = colour("--page");
        context.fillRect(x + 4, y + 4, cell - 8, cell - 8);
      }
    });
  };

  const shown = () => layers.filter((layer) => layer.depth === depth);
  const describe = () => {
    const [x, y] = [token % side, Math.floor(token / side)];
    const lines = shown().filter((layer) => layer.codes).map((layer) => {
      const mine = bits(layer, token).join("");
      let same = 0;
      for (let i = 0; i < tokens; i++) same += bits(layer, i).join("") === mine;
      const groups = mine.replace(/(.{4})(?=.)/g, "$1 ");
      return `${layer.model}: code ${groups}, shared by ${same.toLocaleString("en")} tokens.`;
    });
    status.textContent = [`Token in row ${y + 1}, column ${x + 1}.`, ...lines].join("\n");
  };
  const canvases = (role) => document.querySelectorAll(`canvas[data-role="${role}"]`);
  const drawToken = () => {
    canvases("input").forEach(drawInput);
    for (const layer of shown()) canvases("map").forEach((c) => c.dataset.model === layer.model && drawMap(c, layer));
    describe();
  };
  const drawAll = () => {
    for (const layer of shown())
      canvases("codes").forEach((c) => c.dataset.model === layer.model && drawCodes(c, layer));
    canvases("answers").forEach((c) => drawAnswers(c, data.answers[c.dataset.model]));
    drawToken();
  };
  const choose = (next) => {
    token = next;
    drawToken();
  };

  document.querySelectorAll("canvas.map").forEach((canvas) => {
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const at = (offset, size) => Math.min(side - 1, Math.max(0, Math.floor((offset / size) * side)));
      choose(at(event.clientY - box.top, box.height) * side + at(event.clientX - box.left, box.width));
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const x = (token % side) + step[0], y = Math.floor(token / side) + step[1];
      if (x >= 0 && x < side && y >= 0 && y < side) choose(y * side + x);
    });
  });
  document.querySelectorAll('input[name="layer"]').forEach((input) =>
    input.addEventListener("change", () => {
      depth = Number(input.value);
      drawAll();
    }),
  );
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", drawAll);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));
  drawAll();
  document.documentElement.dataset.ready = "yes";
})();
