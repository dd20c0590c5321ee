"""`meshrl migrate`: translate scripts and configs of verl into commands of this package."""
