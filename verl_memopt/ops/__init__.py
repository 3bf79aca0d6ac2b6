"""Operations with a backward of their own: what memory knobs compute with."""
