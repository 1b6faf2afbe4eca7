"""The page in headless Chromium: it renders, reacts to clicks and keys, and logs nothing."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from test_page import make_run

from ecoformer.report.inside import Layer, Sample
from ecoformer.report.page import read_run, table_rows, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TRY = """
<script>
const wait = setInterval(() => {
  if (document.documentElement.dataset.ready !== "yes") return;
  clearInterval(wait);
  const maps = [...document.querySelectorAll("canvas.map")], status = document.getElementById("status");
  const look = () => maps.map((canvas) => canvas.toDataURL()).concat(status.textContent);
  const seen = [look()];
  const box = maps[0].getBoundingClientRect();
  maps[0].dispatchEvent(new MouseEvent("click", { clientX: box.left + 2, clientY: box.top + 2 }));
  seen.push(look());
  maps[1].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  seen.push(look());
  document.querySelectorAll('input[name="layer"]')[1].click();
  seen.push(look());
  const differ = (i) => seen[i].map((value, j) => value !== seen[i - 1][j]);
  const found = { click: differ(1), key: differ(2), layer: differ(3), text: seen.map((x) => x.at(-1)) };
  found.wide = document.documentElement.scrollWidth > innerWidth;
  found.width = innerWidth;
  parent.postMessage(found, "*");
}, 20);
</script>
"""
# Chromium's windows are at least 500 pixels wide; a frame is as narrow as we like.
FRAME = """
<iframe src="page.html" width="400" height="900" style="border: 0"></iframe>
<pre id="found"></pre>
<script>
const found = document.getElementById("found");
addEventListener("message", (event) => (found.textContent = JSON.stringify(event.data)));
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_click_and_an_arrow_key_change_the_maps(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def layer(bits):
        codes = torch.rand(16, bits, generator=generator) > 0.5 if bits else None
        return Layer("layer", torch.rand(16, 16, generator=generator), codes)

    pixels = torch.randint(256, (3, 16, 16), generator=generator, dtype=torch.uint8)
    target = torch.arange(16) % 3
    sample = Sample(pixels, 3, target, {"softmax": target, "eco": 1 - target % 2})
    sample.layers.update(softmax=[layer(0), layer(0)], eco=[layer(8), layer(8)])
    runs = [read_run(make_run(tmp_path / name, name)) for name in ("softmax", "eco")]
    times = [{"name": run.name, "tokens": n, "ms": n / 16} for run in runs for n in (16, 64)]
    page = tmp_path / "page.html"
    write_page(page, "Page", "Lead", runs, table_rows(runs), sample=sample, times=times)
    page.write_text(page.read_text().replace("</body>", TRY + "</body>"))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    options += ["--virtual-time-budget=100000", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run([BROWSER, *options, frame.as_uri()], capture_output=True, text=True, timeout=120)
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert logged == []
    place = re.search(r'<pre id="found">(.+?)</pre>', done.stdout)
    assert place, done.stdout[-2000:]
    found = json.loads(place[1])
    assert found["click"] == [True] * 4  # input, softmax, eco, words
    assert found["key"] == [True] * 4
    assert found["layer"] == [False, True, True, True]
    assert "row 1, column 1" in found["text"][1]
    assert "row 1, column 2" in found["text"][2]
    assert found["width"] == 400
    assert not found["wide"]
