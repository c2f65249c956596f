"""The examples that were hardest and easiest for the model, with what was done to them."""

from he_keras.evaluation.report_page import formatting
from he_keras.evaluation.report_page.markup import Html, join, tag
from he_keras.evaluation.report_page.pictures import Album, Triple, can_show, make_album
from he_keras.evaluation.report_page.section import Section
from he_keras.evaluation.report_page.source import ReportSource
from he_keras.evaluation.report_page.tables import paragraphs

_KINDS = {
    "hardest": ("Hardest for the model", "What an attack broke most clearly."),
    "easiest": ("Easiest for the model", "What held most clearly under every attack."),
}
# Smaller images are enlarged on the page, and would blur.
_CRISP_BELOW = 96


def gallery(source: ReportSource) -> Section | None:
    """Clean image, adversarial image and magnified change of some examples."""
    examples = source.report.get("gallery") or []
    if not examples:
        return None
    clean, adversarial = source.gallery["clean"], source.gallery["adversarial"]
    if clean.shape != adversarial.shape or not can_show(clean):
        reason = f"These examples cannot be shown as pictures: their shape is {clean.shape[1:]}."
        return Section("gallery", "Examples", paragraphs(reason))
    album = make_album(clean, adversarial, source.report["threat"].get("bounds") or (0, 1))
    parts: list[Html] = [_intro(album)]
    for kind in dict.fromkeys(example.get("kind") for example in examples):
        title, meaning = _KINDS.get(str(kind), (str(kind), None))
        cards = [
            _card(source, example, triple, album)
            for example, triple in zip(examples, album.triples, strict=True)
            if example.get("kind") == kind
        ]
        parts.append(tag("h3", title))
        parts.append(paragraphs(meaning))
        parts.append(tag("ul", *cards, class_="gallery"))
    return Section("gallery", "Examples", join(parts))


def _intro(album: Album) -> Html:
    words = (
        "From left to right: the clean image, the worst image an attack made of it, and the "
        "difference, magnified as written so that its largest change reaches black or white; grey "
        "is no change."
    )
    if album.side < album.original_side:
        words += (
            f" Shown at {album.side} of {album.original_side} pixels; gallery.npz has the full "
            "size."
        )
    return paragraphs(words)


def _card(source: ReportSource, example: dict, triple: Triple, album: Album) -> Html:
    label, before, after = (
        source.class_name(example.get(key))
        for key in ("label", "clean_prediction", "adversarial_prediction")
    )
    position = example.get("position")
    factor = f"{triple.magnification:,.3g}" if triple.magnification else "no change"
    times = f"magnified {factor} times" if triple.magnification else factor
    crisp = "crisp" if album.side < _CRISP_BELOW else None
    pictures = (
        (triple.clean, f"Clean image {position}: {label} → {before}", "clean"),
        (triple.adversarial, f"Adversarial image {position}: {label} → {after}", "adversarial"),
        (
            triple.difference,
            f"Perturbation of image {position}, {times}: {label} → {after}",
            f"× {factor}" if triple.magnification else factor,
        ),
    )
    shown = [
        tag("figure", tag("img", src=data, alt=alt, class_=crisp), tag("figcaption", caption))
        for data, alt, caption in pictures
    ]
    return tag(
        "li",
        tag("div", *shown, class_="triple"),
        tag("p", _verdict(example, label, before, after)),
        tag("p", _remark(example), class_="remark"),
    )


def _verdict(example: dict, label: str, before: str, after: str) -> Html:
    if before != label:
        return join([tag("b", label), " → ", tag("b", before), ", wrong from the start"])
    if after == label:
        return join([tag("b", label), " stays ", tag("b", after)])
    return join([tag("b", label), " → ", tag("b", after)])


def _remark(example: dict) -> str:
    parts = [f"position {example.get('position')}"]
    if example.get("broken_by"):
        parts.append(f"broken by {example['broken_by']}")
    parts.append(f"margin {formatting.significant(example.get('margin'), 3)}")
    parts.append(f"distance {formatting.significant(example.get('distance'), 3)}")
    return " · ".join(parts)
