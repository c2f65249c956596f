"""The pages in a real browser: headless Chromium, driven by selenium."""

import base64
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from report_samples import write_sample

from he_keras.evaluation import write_comparison_html
from he_keras.evaluation.report import write_html

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="needs a browser: apt-get install chromium chromium-driver",
    ),
]

LONG_NAME = "transfer:/a/very/long/path/without/any/space/" + "x" * 60 + ".keras"
VISIBLE_TEXT = """
const hasText = e => [...e.childNodes].some(c => c.nodeType === 3 && c.data.trim());
return [...document.querySelectorAll("main *")].filter(e => e.checkVisibility() && hasText(e))
"""


@pytest.fixture(name="driver", scope="module")
def started_driver():
    selenium = pytest.importorskip("selenium.webdriver", reason="needs pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(name="pages", scope="module")
def written_pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        write_sample(
            folder / name,
            seed=number,
            title=f"Run {name}",
            training={"name": LONG_NAME, "seed": number // 2, "width": number % 2},
        )
        for number, name in enumerate("abcd")
    ]
    attacks = json.loads((runs[0] / "report.json").read_text())["attacks"]
    attacks[0]["name"] = LONG_NAME
    odd = write_sample(folder / "odd", attacks=attacks, title="W" * 90, mode="individual")
    return {
        "report": write_html(runs[0]),
        "odd": write_html(odd),
        "bare": write_html(write_sample(folder / "bare", optional=False)),
        "comparison": write_comparison_html(runs, folder / "comparison.html"),
    }


def emulate(driver, width=1280, scheme="light", media=""):
    # Smooth scrolling would move headers away from under the mouse.
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def show(driver, path, **settings):
    driver.get_log("browser"), driver.get_log("performance")
    emulate(driver, **settings)
    driver.get(path.as_uri())


def requests(driver):
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]


def order(driver, table="attack-table"):
    """Names in the first column of row headers, top to bottom."""
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody th`)].map(e => e.innerText)"
    )
    return driver.execute_script(script, table)


def sorted_columns(driver):
    script = (
        "return [...document.querySelectorAll('#attack-table th[aria-sort]')]"
        ".map(e => [e.innerText.trim(), e.ariaSort])"
    )
    return driver.execute_script(script)


def button(driver, words, table="attack-table"):
    from selenium.webdriver.common.by import By

    found = driver.find_elements(By.CSS_SELECTOR, f"#{table} thead button")
    return next(each for each in found if each.text.startswith(words))


@pytest.mark.parametrize("page", ["report", "odd", "bare", "comparison"])
def test_page_loads_without_errors_and_without_the_network(driver, pages, page):
    show(driver, pages[page])
    button_names = driver.execute_script(
        "return [...document.querySelectorAll('thead button')].map(e => e.innerText)"
    )
    assert button_names and driver.get_log("browser") == []
    asked = [url for url in requests(driver) if not url.startswith("data:")]
    assert asked == [pages[page].as_uri()]


def test_what_the_policy_forbids_is_reported(driver, pages, tmp_path):
    """The test above could not see an error if the log did not hold any."""
    source = pages["report"].read_text()
    broken = tmp_path / "broken.html"
    broken.write_text(source.replace('"use strict";', '"use strict"; missing();', 1))
    show(driver, broken)
    assert driver.get_log("browser")


def test_clicking_a_header_sorts_and_stages_stay_with_their_attack(driver, pages):
    show(driver, pages["report"])
    stages = ["apgd-ce-100", "apgd-t-100", "fab-t-100", "square-5000"]
    before = ["fgsm", "pgd-20 scale 1", "cw-linf-20", "autoattack", *stages]
    assert order(driver) == before and sorted_columns(driver) == []
    button(driver, "Robust accuracy").click()
    upward = ["autoattack", *stages, "cw-linf-20", "pgd-20 scale 1", "fgsm"]
    assert order(driver) == upward
    assert [state for _, state in sorted_columns(driver)] == ["ascending"]
    button(driver, "Robust accuracy").click()
    assert order(driver) == before
    assert [state for _, state in sorted_columns(driver)] == ["descending"]
    last = driver.execute_script(
        "return [...document.querySelectorAll('#attack-table tbody')].at(-1).innerText"
    )
    assert "Square broke" in last, "the warning stays with its attack"
    button(driver, "Attack").click()
    assert order(driver) == ["autoattack", *stages, "cw-linf-20", "fgsm", "pgd-20 scale 1"]
    assert len(sorted_columns(driver)) == 1
    said = driver.execute_script("return document.getElementById('announcement').textContent")
    assert said == "Sorted by Attack, ascending."
    button(driver, "Order").click()
    assert order(driver) == before


def test_missing_figures_come_last_either_way(driver, pages, tmp_path):
    write_sample(tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    report["attacks"][1]["median_distance"] = None
    (tmp_path / "report.json").write_text(json.dumps(report))
    show(driver, write_html(tmp_path))
    for _ in range(2):
        button(driver, "Median distance").click()
        assert order(driver)[-1] == "pgd-20 scale 1"


def test_numbers_sort_as_numbers(driver, pages):
    show(driver, pages["report"])
    script = (
        "return [...document.querySelectorAll('#class-table tbody tr')]"
        ".map(r => Number(r.cells[1].innerText))"
    )
    button(driver, "Examples", "class-table").click()
    shown = driver.execute_script(script)
    assert shown == sorted(shown) and len(shown) == 10
    # As text 3061 would come before 340 and 4.2.
    before = order(driver)
    button(driver, "Time").click()
    assert order(driver) == before


def test_tab_reaches_the_headers_and_enter_sorts(driver, pages):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(driver, pages["report"])
    focused = []
    for _ in range(60):
        ActionChains(driver).send_keys(Keys.TAB).perform()
        element = driver.switch_to.active_element
        focused.append(element.tag_name)
        if element.tag_name == "button" and element.text == "Robust accuracy":
            break
    assert focused[0] == "a", "the link that skips the contents comes first"
    assert element.text == "Robust accuracy"
    outline = driver.execute_script("return getComputedStyle(arguments[0]).outlineStyle", element)
    assert outline == "solid", "focus can be seen"
    before = order(driver)
    ActionChains(driver).send_keys(Keys.ENTER).perform()
    assert sorted_columns(driver) == [[element.text, "ascending"]]
    assert order(driver) != before
    ActionChains(driver).send_keys(Keys.SPACE).perform()
    assert sorted_columns(driver)[0][1] == "descending"
    assert driver.switch_to.active_element == element, "sorting keeps the focus"


def test_skip_link_leads_to_the_result(driver, pages):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show(driver, pages["report"])
    ActionChains(driver).send_keys(Keys.TAB).send_keys(Keys.ENTER).perform()
    assert driver.execute_script("return document.activeElement.id") == "main"


@pytest.mark.parametrize("page", ["report", "odd", "bare", "comparison"])
@pytest.mark.parametrize("width", [320, 375, 800, 1280])
def test_the_page_never_scrolls_sideways(driver, pages, page, width):
    show(driver, pages[page], width=width)
    driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    widest = driver.execute_script("return document.documentElement.scrollWidth")
    assert widest <= width
    outside = driver.execute_script(
        "return [...document.querySelectorAll('main *')].filter(e => e.checkVisibility()"
        " && !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


def test_text_on_a_phone_is_large_enough(driver, pages):
    show(driver, pages["report"], width=375)
    script = (
        "const zoom = e => e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1;"
        + VISIBLE_TEXT
        + ".map(e => [parseFloat(getComputedStyle(e).fontSize) * zoom(e), e.outerHTML])"
    )
    small = [each for each in driver.execute_script(script) if each[0] < 10]
    assert small == []


@pytest.mark.parametrize("width", [320, 375, 1280])
def test_words_of_the_chart_neither_overlap_nor_leave_it(driver, pages, width):
    show(driver, pages["report"], width=width)
    boxes = driver.execute_script(
        "const outer = document.querySelector('svg').getBoundingClientRect();"
        "return [[outer.left, outer.top, outer.right, outer.bottom],"
        " ...[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect())"
        ".map(b => [b.left, b.top, b.right, b.bottom])]"
    )
    (left, top, right, bottom), *words = boxes
    assert len(words) > 8
    for number, one in enumerate(words):
        assert left <= one[0] and top <= one[1] and one[2] <= right and one[3] <= bottom
        for other in words[number + 1 :]:
            apart_across = one[2] <= other[0] or other[2] <= one[0]
            # Boxes of letters are higher than the letters.
            apart_down = one[3] - 4 <= other[1] or other[3] - 4 <= one[1]
            assert apart_across or apart_down


@pytest.mark.parametrize("page", ["report", "comparison"])
def test_every_picture_has_words_and_has_loaded(driver, pages, page):
    show(driver, pages[page])
    silent = driver.execute_script(
        "return [...document.querySelectorAll('img')].filter(e => !e.alt || !e.naturalWidth).length"
        " + [...document.querySelectorAll('svg')]"
        ".filter(e => !e.querySelector('title') || !e.querySelector('desc')).length"
    )
    assert silent == 0
    unnamed = driver.execute_script(
        "return [...document.querySelectorAll('button, a, summary, [role=region], table')]"
        ".filter(e => !(e.getAttribute('aria-labelledby') || e.textContent.trim())).length"
    )
    assert unnamed == 0


def screenshot(driver):
    png = driver.execute_cdp_cmd("Page.captureScreenshot", {})["data"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("L"))


def test_dark_and_light_schemes_and_print(driver, pages):
    show(driver, pages["report"], scheme="light")
    light = screenshot(driver)
    emulate(driver, scheme="dark")
    dark = screenshot(driver)
    assert np.median(light) > 240 and np.median(dark) < 40
    assert dark.max() > 200, "there is light text on the dark ground"
    printed = []
    for scheme in ("light", "dark"):
        emulate(driver, scheme=scheme, media="print")
        printed.append(screenshot(driver))
    assert np.median(printed[0]) > 240
    np.testing.assert_array_equal(*printed, "paper is white in the dark scheme too")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_rendered_text_has_contrast(driver, pages, scheme):
    """The colours that the browser really puts on each other, not only those of the variables."""
    show(driver, pages["report"], scheme=scheme)
    script = (
        "const ground = e => { for (; e; e = e.parentElement) {"
        " const c = getComputedStyle(e).backgroundColor;"
        " if (!c.endsWith(', 0)')) return c; } return 'rgb(255, 255, 255)'; };"
        + VISIBLE_TEXT
        + ".map(e => [e.ownerSVGElement ? getComputedStyle(e).fill : getComputedStyle(e).color,"
        " ground(e), e.outerHTML.slice(0, 60)])"
    )
    measured = driver.execute_script(script)
    assert len(measured) > 200
    low = [each for each in measured if contrast(each[0], each[1]) < 4.5]
    assert low == []


def contrast(one, other):
    def luminance(colour):
        channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", ["report", "odd", "comparison"])
def test_print_is_complete_and_fits_the_paper(driver, pages, page):
    show(driver, pages[page])
    # A4 less margins, at 96 pixels an inch.
    emulate(driver, width=703, media="print")
    driver.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    closed = driver.execute_script("return document.querySelectorAll('details:not([open])').length")
    assert closed == 0
    cut = driver.execute_script(
        "return [...document.querySelectorAll('table, pre, img, svg')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.id)"
    )
    assert cut == []
    driver.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert driver.execute_script("return document.querySelectorAll('details:not([open])').length")
    pdf = driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert base64.b64decode(pdf).startswith(b"%PDF") and len(pdf) > 20_000


def test_everything_is_there_without_the_script(driver, pages, tmp_path):
    path = tmp_path / "plain.html"
    source = pages["report"].read_text()
    path.write_text(source[: source.index("<script>")] + "</body></html>")
    show(driver, path)
    assert not driver.execute_script("return document.querySelectorAll('button').length")
    headers = driver.execute_script(
        "return [...document.querySelectorAll('#attack-table thead th')].map(e => e.innerText)"
    )
    assert headers[:3] == ["Order", "Attack", "Robust accuracy"]
    assert len(order(driver)) == 8
