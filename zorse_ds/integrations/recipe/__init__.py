"""`zorse train`: a whole run from one JSON file, through DeepSpeed's own launcher."""
