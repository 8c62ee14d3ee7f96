"""Runs of a made-up command, and a headless Chromium to read their reports in."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perpend import commands
from perpend.runs import FinishedRun, Run

VERBS = Path(__file__).parent / "verbs"


@pytest.fixture(scope="module", autouse=True)
def _fake_command() -> Iterator[None]:
    """`perpend fake`: one file put into perpend.commands, as a user's own verb would be."""
    before = list(commands.__path__)
    commands.__path__.append(str(VERBS))
    yield
    commands.__path__[:] = before
    sys.modules.pop("perpend.commands.fake", None)


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., FinishedRun]:
    """A finished run folder of the made-up command."""
    from perpend.commands import fake

    def make(name: str = "run", *, hostile: bool = False, **size: int) -> FinishedRun:
        folder = tmp_path_factory.mktemp("runs") / name
        request = {
            "model": {
                "name": fake.HOSTILE if hostile else "small-model",
                "parameters": 134_515_008,
                "layers": 30,
            },
            "data": {"name": "some text", "sequences": 64, "length": 192, "bos": False},
            "seeds": [0, 1, 2],
            "layers": size.get("layers", 12),
        }
        with Run.start(folder, command="fake", request=request) as run:
            fake.make(run, hostile=hostile, **size)
        return Run.open(folder)

    return make


@pytest.fixture(scope="module")
def run(make_run: Callable[..., FinishedRun]) -> FinishedRun:
    return make_run()


class Browser:
    """A page in headless Chromium, with what it logged and asked for."""

    def __init__(self, driver: Any, downloads: Path) -> None:
        self.driver, self.downloads = driver, downloads

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.do("Emulation.setEmulatedMedia", {"media": "", "features": scheme})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.do("Emulation.setDeviceMetricsOverride", size)
        self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(path.resolve().as_uri())
        self.wait("return document.documentElement.dataset.ready === 'yes'")

    def do(self, command: str, settings: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(command, settings)

    def js(self, code: str, *values: Any) -> Any:
        return self.driver.execute_script(code, *values)

    def wait(self, condition: str, *values: Any, seconds: float = 30) -> Any:
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.05).until(
            lambda driver: driver.execute_script(condition, *values)
        )

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Every address the page asked for, its own file left out."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:", self.driver.current_url))]

    def point(self, selector: str, number: int = 0, click: bool = False) -> None:
        """Moves the mouse onto the middle of an element, and perhaps clicks."""
        from selenium.webdriver.common.action_chains import ActionChains

        element = self.driver.find_elements("css selector", selector)[number]
        # The page hears of a scroll with its next frame, and hides what the mouse had shown by then.
        self.js(
            "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'});"
            "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))",
            element,
        )
        chain = ActionChains(self.driver).move_to_element(element)
        (chain.click() if click else chain).perform()

    def press(self, key: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(key).perform()

    def downloaded(self, name: str) -> str:
        path = self.downloads / name
        self.wait("return true")
        for _ in range(200):
            if path.exists() and path.stat().st_size:
                return path.read_text(encoding="utf-8")
            self.js("return new Promise(done => setTimeout(done, 25))")
        raise AssertionError(
            f"{name} was not downloaded; there is {[p.name for p in self.downloads.iterdir()]}"
        )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: pip install selenium"
    )
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.binary_location = chromium
    found = shutil.which("chromedriver")
    service = webdriver.ChromeService(found) if found else webdriver.ChromeService()
    driver = webdriver.Chrome(options=options, service=service)
    downloads = tmp_path_factory.mktemp("downloads")
    settings = {"behavior": "allow", "downloadPath": str(downloads)}
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", settings)
    yield Browser(driver, downloads)
    driver.quit()
