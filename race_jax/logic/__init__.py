"""LoGiC: which turns of a finished trajectory need their reasoning."""
