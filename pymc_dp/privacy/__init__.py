"""How answers about records are made safe: :mod:`pymc_dp.privacy.answer` is the page to read."""
