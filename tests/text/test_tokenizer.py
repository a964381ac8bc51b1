import json
import unicodedata

import pytest
import text_models
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.sessions.tokenizer import Detokenizer, Tokenizer

NAMES = ["smollm2", "qwen3", "sentencepiece"]
QUICK = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(data=st.data())
def test_a_stream_gives_the_text_of_all_ids_at_any_split(name, data):
    tokenizer = text_models.tokenizer(name)
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 3), max_size=40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces.append(stream.flush())
    assert "".join(pieces) == tokenizer.decode(ids)
    for piece in pieces:
        piece.encode()


@pytest.mark.parametrize("name", NAMES)
@QUICK
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_survives_encoding_and_no_push_shows_half_a_character(name, text):
    tokenizer = text_models.tokenizer(name)
    ids = tokenizer.encode_text(text)
    expected = tokenizer.decode(ids)
    if name == "qwen3":
        assert expected == unicodedata.normalize("NFC", text)
    stream = Detokenizer(tokenizer)
    shown = "".join(stream.push([token]) for token in ids) + stream.flush()
    assert shown == expected
    assert shown.count("\ufffd") == expected.count("\ufffd")


@QUICK
@given(ids=st.lists(st.integers(17, 49151), max_size=30))
def test_byte_level_decoding_equals_the_tokenizers_library(ids):
    ours, reference = text_models.tokenizer("smollm2"), text_models.reference("smollm2")
    assert ours.decode(ids) == reference.backend_tokenizer.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_added_token_as_text_gives_no_control_id(name):
    tokenizer = text_models.tokenizer(name)
    for control in tokenizer.controls:
        for text in (control, f"a{control}b", control * 3, f" {control} "):
            for place in ("start", "segment", "continuation"):
                ids = tokenizer.encode_text(text, place)
                assert tokenizer.control_ids.isdisjoint(ids)
                assert tokenizer.decode(ids).strip() == text.strip()


@pytest.mark.parametrize("name", NAMES)
def test_unbroken_control_strings_in_a_render_give_the_ids_of_the_real_tokenizer(name):
    tokenizer, reference = text_models.tokenizer(name), text_models.reference(name)
    controls = tokenizer.controls
    renders = [
        "".join(f"{control} some text\n" for control in controls),
        "".join(controls),
        f"lead {controls[0]}{controls[1]}  x  {controls[-1]}  \n y",
        "no control at all",
    ]
    for render in renders:
        expected = reference.encode(render, add_special_tokens=False)
        assert tokenizer.encode_render(render, "\ufdd0") == expected


def test_a_unigram_vocabulary_cannot_match_a_control_piece_in_text():
    vocabulary = [["<unk>", 0.0], ["</s>", -1.0]]
    vocabulary += [[c, -5.0] for c in "abc</s>▁"]
    pipeline = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(1, "</s>", special=True)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first",
            "split": False,
        },
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False},
    }
    plain = tokenizers.Tokenizer.from_str(json.dumps({**pipeline, "added_tokens": []}))
    assert 1 in plain.encode("ab</s>c").ids
    tokenizer = Tokenizer(pipeline, {"eos_token": "</s>"})
    ids = tokenizer.encode_text("ab</s>c", "start")
    assert 1 not in ids
    assert tokenizer.decode(ids) == "ab</s>c"
    assert tokenizer.stop_ids == (1,)
    after_control = tokenizer.encode_render("a</s>a", "\ufdd0")
    assert [tokenizer.decode([token]) for token in after_control][-1] == "a"
    assert len(after_control) == 4  # prefix, a, control, a: no second prefix


def test_added_white_space_is_text():
    pipeline = json.loads((text_models.smollm() / "tokenizer.json").read_text())
    tab = pipeline["model"]["vocab"]["ĉ"]
    pipeline["added_tokens"].append(_added(tab, "\t", special=False))
    tokenizer = Tokenizer(pipeline, {})
    assert tab not in tokenizer.control_ids
    assert tokenizer.encode_text("a\tb")[1] == tab


def test_a_missing_or_unknown_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    model = {"type": "WordPiece", "vocab": {"a": 0}}
    with pytest.raises(ValueError, match="decoder"):
        Tokenizer({"model": model, "decoder": {"type": "WordPiece"}}, {})


def _added(token, content, *, special):
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": content, "special": special, **flags}
