"""docs/faq.md: every complaint has a case, and every case still gives its diagnosis."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
spec = importlib.util.spec_from_file_location("faq_cases", DOCS / "faq_cases.py")
faq = importlib.util.module_from_spec(spec)
spec.loader.exec_module(faq)
PAGE = (DOCS / "faq.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- case: ([\w-]+) -->\n```text\n(.*?)```", PAGE, flags=re.S))


def test_the_page_has_twelve_complaints_each_with_the_output_of_its_case():
    assert set(BLOCKS) == set(faq.CASES)
    assert len(re.findall(r"^## \d+ ", PAGE, flags=re.M)) == len(faq.CASES) == 12
    for name, (_, diagnosis) in faq.CASES.items():
        assert re.search(diagnosis, BLOCKS[name]), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", faq.CASES)
def test_a_run_made_to_fail_gets_its_diagnosis(name):
    assert re.search(faq.CASES[name][1], faq.output(name))
