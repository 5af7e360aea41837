"""Open a page in headless Chromium (Qt's WebEngine), act on it, and say what it did.

Run as a program of its own, since a browser wants a process to itself:

    python -m tests.support.browser PAGE ACTIONS [dark]

ACTIONS is JSON: a list of `{"script": ...}` (its result is reported), `{"await": ...}`
(the same until it is true, and not reported), `{"key": ...}` (a key such as "Right" is
pressed), `{"point": [X, Y]}` (the mouse moves there), `{"drag": [X, Y, TO_X, TO_Y]}`,
`{"wheel": [X, Y, STEPS]}`, `{"size": [WIDTH, HEIGHT]}`, `{"save": PATH}` (a screenshot)
and `{"print": PATH}` (a PDF). It prints one JSON object: `results`, `messages` of the
console, and `requests` for anything beyond the page.
"""

# pyright: reportMissingImports=false
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
# What Chromium calls the reader's wish for dark pages; 0 is dark, 1 is light.
_SCHEME = f"--blink-settings=preferredColorScheme={0 if 'dark' in sys.argv else 1}"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--disable-gpu {_SCHEME}"

from PyQt6.QtCore import QEvent, QPoint, QPointF, Qt, QTimer, QUrl
from PyQt6.QtGui import QKeyEvent, QMouseEvent, QWheelEvent
from PyQt6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication


class Interceptor(QWebEngineUrlRequestInterceptor):
    """Notes what is asked for beyond the page itself."""

    def __init__(self, page: str, requests: list[str]) -> None:
        super().__init__()
        self._page = page
        self._requests = requests

    def interceptRequest(self, info: Any) -> None:  # noqa: N802 (Qt's name)
        address = info.requestUrl().toString()
        if address.split("#")[0] != self._page:
            self._requests.append(address)


class Page(QWebEnginePage):
    """Notes what the console says."""

    messages: list[str]

    def javaScriptConsoleMessage(  # noqa: N802 (Qt's name)
        self,
        level: Any,
        message: str | None,
        lineNumber: int,  # noqa: N803 (Qt's name)
        sourceID: str | None,  # noqa: N803 (Qt's name)
    ) -> None:
        self.messages.append(f"{message} (line {lineNumber})")


class Browser:
    """Runs the actions one after the other."""

    def __init__(self, path: Path, actions: list[dict[str, Any]]) -> None:
        self.report: dict[str, list[Any]] = {"results": [], "messages": []}
        self.report["requests"] = []
        self._application = QApplication(sys.argv[:1])
        self._actions = actions
        address = QUrl.fromLocalFile(str(path.resolve()))
        profile = QWebEngineProfile()
        self._interceptor = Interceptor(address.toString(), self.report["requests"])
        profile.setUrlRequestInterceptor(self._interceptor)
        self._view = QWebEngineView()
        self._page = Page(profile, self._view)
        self._page.messages = self.report["messages"]
        # Otherwise a request would be refused before anybody sees it.
        remote = QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls
        settings = self._page.settings()
        assert settings is not None
        settings.setAttribute(remote, True)
        self._profile = profile
        self._view.setPage(self._page)
        self._view.resize(1000, 800)
        self._view.loadFinished.connect(lambda _: self._later(self._advance))
        self._view.load(address)
        self._view.show()

    def run(self) -> None:
        """Run until all is done, or a minute has passed."""
        QTimer.singleShot(60_000, self._application.quit)
        self._application.exec()

    def _later(self, do: Callable[[], None]) -> None:
        QTimer.singleShot(150, do)

    def _advance(self) -> None:
        if not self._actions:
            self._application.quit()
            return
        match self._actions.pop(0):
            case {"script": str(script)}:
                self._page.runJavaScript(script, self._note)
                return
            case {"await": str(script)}:
                self._page.runJavaScript(
                    script, lambda is_so: self._await(script, is_so)
                )
                return
            case {"print": str(path)}:
                self._page.pdfPrintingFinished.connect(
                    lambda *_: self._later(self._advance)
                )
                self._page.printToPdf(path)
                return
            case {"key": str(name)}:
                self._press(getattr(Qt.Key, f"Key_{name}"))
            case {"point": [float() | int() as x, float() | int() as y]}:
                self._mouse(QEvent.Type.MouseMove, x, y, Qt.MouseButton.NoButton)
            case {"drag": [x, y, to_x, to_y]}:
                left = Qt.MouseButton.LeftButton
                self._mouse(QEvent.Type.MouseButtonPress, x, y, left)
                for part in (0.25, 0.5, 0.75, 1):
                    at = x + part * (to_x - x), y + part * (to_y - y)
                    self._mouse(QEvent.Type.MouseMove, *at, left)
                self._mouse(QEvent.Type.MouseButtonRelease, to_x, to_y, left)
            case {"wheel": [x, y, steps]}:
                place = QPointF(x, y)
                wheel = QWheelEvent(
                    place,
                    place,
                    QPoint(),
                    QPoint(0, 120 * steps),
                    Qt.MouseButton.NoButton,
                    Qt.KeyboardModifier.NoModifier,
                    Qt.ScrollPhase.NoScrollPhase,
                    False,
                )
                QApplication.postEvent(self._target(), wheel)
            case {"save": str(path)}:
                # What changed a moment ago is painted by another process.
                QTimer.singleShot(700, lambda: self._save(path))
                return
            case {"size": [int(width), int(height)]}:
                self._view.resize(width, height)
            case other:
                raise ValueError(f"no such action: {other}")
        self._later(self._advance)

    def _note(self, result: Any) -> None:
        self.report["results"].append(result)
        self._later(self._advance)

    def _await(self, script: str, is_so: Any) -> None:
        if not is_so:
            self._actions.insert(0, {"await": script})
        self._later(self._advance)

    def _save(self, path: str) -> None:
        self._view.grab().save(path)
        self._later(self._advance)

    def _target(self) -> Any:
        return self._view.focusProxy() or self._view

    def _mouse(self, kind: Any, x: float, y: float, button: Any) -> None:
        pressed = Qt.MouseButton.NoButton if kind == QEvent.Type.MouseMove else button
        place = QPointF(x, y)
        event = QMouseEvent(
            kind, place, place, pressed, button, Qt.KeyboardModifier.NoModifier
        )
        QApplication.postEvent(self._target(), event)

    def _press(self, key: Qt.Key) -> None:
        target = self._target()
        text = chr(key).lower() if 32 < key < 127 else ""
        for kind in (QEvent.Type.KeyPress, QEvent.Type.KeyRelease):
            event = QKeyEvent(kind, key, Qt.KeyboardModifier.NoModifier, text)
            QApplication.postEvent(target, event)


if __name__ == "__main__":
    browser = Browser(Path(sys.argv[1]), json.loads(sys.argv[2]))
    browser.run()
    sys.stdout.write(json.dumps(browser.report))
    sys.stdout.flush()
    # Qt takes its parts down in an order of its own, and Chromium complains.
    os._exit(0)
