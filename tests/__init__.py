"""Tests, one folder a layer of cost: unit, inprocess, ranks, docs, gpu."""
