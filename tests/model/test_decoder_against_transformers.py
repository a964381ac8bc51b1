import pytest
import torch
from tiny_models import (
    FAMILIES,
    edit_config,
    load_decoder,
    run_rows,
    save_random,
    shuffled_tables,
)

TOKENS = 150
TOLERANCE = 1e-4


@pytest.fixture(params=FAMILIES, scope="module")
def models(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    reference = save_random(request.param, directory)
    return reference, load_decoder(directory)


@pytest.fixture
def tokens():
    return torch.randint(0, 199, (TOKENS,), generator=torch.Generator().manual_seed(1))


def expected_logits(reference, tokens):
    with torch.no_grad():
        logits = reference(tokens[None]).logits[0]
    spread = logits.std().item()
    assert spread > 0.5, "flat logits would agree whatever the decoder does"
    return logits


def difference(actual, expected):
    return (actual - expected).abs().max().item()


def test_one_prefill_gives_the_logits_of_transformers(models, tokens):
    reference, decoder = models
    tables = shuffled_tables(decoder, 2)
    got = run_rows(decoder, tables, [(0, 0, TOKENS)], tokens)
    assert difference(got, expected_logits(reference, tokens)) <= TOLERANCE


def test_chunked_prefill_gives_the_logits_of_transformers(models, tokens):
    reference, decoder = models
    tables = shuffled_tables(decoder, 2)
    got, start = [], 0
    for count in (1, 15, 2, 40, 17, 75):
        got.append(run_rows(decoder, tables, [(1, start, count)], tokens[start : start + count]))
        start += count
    assert start == TOKENS
    assert difference(torch.cat(got), expected_logits(reference, tokens)) <= TOLERANCE


def test_paged_decode_gives_the_logits_of_transformers(models, tokens):
    reference, decoder = models
    tables = shuffled_tables(decoder, 2)
    got = [run_rows(decoder, tables, [(0, 0, 5)], tokens[:5])]
    for position in range(5, TOKENS):
        one = tokens[position : position + 1]
        got.append(run_rows(decoder, tables, [(0, position, 1)], one))
    assert difference(torch.cat(got), expected_logits(reference, tokens)) <= TOLERANCE


def test_decodes_and_chunks_share_a_step(models, tokens):
    reference, decoder = models
    tables = shuffled_tables(decoder, 4)
    others = tokens.flip(0)
    run_rows(decoder, tables, [(0, 0, 60), (2, 0, 33)], torch.cat((tokens[:60], others[:33])))
    step = torch.cat((others[33:34], tokens[60:90], others[:20], tokens[:1]))
    got = run_rows(decoder, tables, [(2, 33, 1), (0, 60, 30), (3, 0, 20), (1, 0, 1)], step)
    ahead, behind = expected_logits(reference, tokens), expected_logits(reference, others)
    expected = torch.cat((behind[33:34], ahead[60:90], behind[:20], ahead[:1]))
    assert difference(got, expected) <= TOLERANCE


def test_the_older_config_layout_means_the_same(tmp_path, tokens):
    reference = save_random("llama tied, rope scaled", tmp_path)
    scaling = dict(reference.config.rope_parameters)
    theta = scaling.pop("rope_theta")
    edit_config(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    decoder = load_decoder(tmp_path)
    got = run_rows(decoder, shuffled_tables(decoder, 1), [(0, 0, TOKENS)], tokens)
    assert difference(got, expected_logits(reference, tokens)) <= TOLERANCE


def test_bfloat16_storage_stays_near_float32(tmp_path, tokens):
    reference = save_random("qwen3", tmp_path)
    decoder = load_decoder(tmp_path, dtype=torch.bfloat16)
    got = run_rows(decoder, shuffled_tables(decoder, 1), [(0, 0, TOKENS)], tokens)
    expected = expected_logits(reference, tokens)
    # Rounding each weight and each key and value to 8 bits moves logits by about 1% of their size.
    assert (got - expected).std() < 0.05 * expected.std()
