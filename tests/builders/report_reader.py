"""Reads a page the strict way: a tree of elements, and the rules that every page must keep."""

import html.parser
import re

VOID = {"meta", "link", "img", "br", "hr", "col"}
HEADINGS = ("h1", "h2", "h3", "h4")


class Element:
    def __init__(self, name, attributes, parent=None):
        self.name, self.attributes, self.parent = name, dict(attributes), parent
        self.children = []

    def get(self, name):
        return self.attributes.get(name)

    def all(self, name=None, /, **attributes):
        """Every element below with this name and these attributes (class_: one of the classes)."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if (name is None or child.name == name) and child.fits(attributes):
                    found.append(child)
                found += child.all(name, **attributes)
        return found

    def one(self, name=None, /, **attributes):
        found = self.all(name, **attributes)
        assert len(found) == 1, f"{len(found)} elements {name} {attributes}"
        return found[0]

    def fits(self, attributes):
        for key, value in attributes.items():
            if key == "class_":
                if value not in (self.get("class") or "").split():
                    return False
            elif self.get(key.replace("_", "-")) != value:
                return False
        return True

    @property
    def text(self):
        """All text below, with single spaces."""
        parts = [each if isinstance(each, str) else each.text for each in self.children]
        return re.sub(r"\s+", " ", " ".join(parts)).strip()


class _Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.root = self.current = Element("document", ())

    def handle_starttag(self, tag, attrs):
        element = Element(tag, attrs, self.current)
        self.current.children.append(element)
        if tag not in VOID:
            self.current = element

    def handle_endtag(self, tag):
        assert self.current.name == tag, f"</{tag}> closes <{self.current.name}>"
        self.current = self.current.parent

    def handle_data(self, data):
        self.current.children.append(data)


def read_page(path):
    """Parses a page and checks the rules that hold for all of them."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.current is reader.root, f"<{reader.current.name}> is never closed"
    page = reader.root
    check_structure(page)
    check_links(page)
    check_tables(page)
    check_pictures(page)
    check_self_contained(page)
    return page


def check_structure(page):
    assert page.one("html").get("lang") == "en"
    assert page.one("head").one("title").text
    assert page.one("meta", name="viewport")
    assert len(page.all("header")) == len(page.all("main")) == len(page.all("footer")) == 1
    assert page.one("nav").get("aria-label")
    skip = page.one("body").all("a")[0]
    assert skip.get("href") == "#main"
    levels = [int(each.name[1]) for each in page.all() if each.name in HEADINGS]
    assert levels[0] == 1 and levels.count(1) == 1
    for before, after in zip(levels, levels[1:], strict=False):
        assert after <= before + 1, "a level of headings is left out"
    for section in page.all("section"):
        assert page.one(id=section.get("aria-labelledby")).name == "h2"


def check_links(page):
    ids = [element.get("id") for element in page.all() if element.get("id")]
    assert len(ids) == len(set(ids)), "an id occurs twice"
    for element in page.all():
        for name in ("aria-labelledby", "aria-describedby"):
            for target in (element.get(name) or "").split():
                assert target in ids, f"{name} points at {target}, which is not there"
    for link in page.all("a"):
        assert link.get("href").removeprefix("#") in ids, f"dead link {link.get('href')}"


def check_tables(page):
    for table in page.all("table"):
        assert table.one("caption").text
        assert all(header.get("scope") in ("col", "row") for header in table.all("th"))
        widths = set()
        for row in table.all("tr"):
            cells = [cell for cell in row.children if isinstance(cell, Element)]
            widths.add(sum(int(cell.get("colspan") or 1) for cell in cells))
        assert len(widths) == 1, f"rows of {table.get('id')} have {widths} columns"
        assert table.parent.get("class") == "scroll" and table.parent.get("tabindex") == "0"


def check_pictures(page):
    for picture in page.all("img"):
        assert picture.get("alt"), "a picture without alternative text"
        assert picture.get("src").startswith("data:image/png;base64,")
    for drawing in page.all("svg"):
        assert drawing.get("role") == "img"
        assert drawing.one("title").text and drawing.one("desc").text


def check_self_contained(page):
    for element in page.all():
        for name in ("src", "href", "action", "data", "srcset"):
            value = element.get(name) or "#"
            assert value.startswith(("#", "data:")), f"{element.name} loads {value[:60]}"
    style = page.one("style").text
    assert "url(" not in style and "@import" not in style
    policy = page.one("meta", http_equiv="Content-Security-Policy")
    assert policy.get("content").startswith("default-src 'none'; img-src data:;")
    inline = [name for element in page.all() for name in element.attributes if name[:2] == "on"]
    assert not inline, f"handlers inside the markup: {inline}"


def cells(page, table_id):
    """The text of every cell of a table: header row first."""
    return [
        [cell.text for cell in row.children if isinstance(cell, Element)]
        for row in page.one("table", id=table_id).all("tr")
    ]
