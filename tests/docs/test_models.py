from tests.docs.pages import DOCS
from tools.models_page import page


def test_the_page_of_models_is_written_from_the_table_of_families():
    assert (DOCS / "models.md").read_text() == page(), "run: python -m tools.models_page > docs/models.md"
