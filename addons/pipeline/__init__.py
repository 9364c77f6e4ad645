"""Pipeline parallelism: the layers of a model in stages on several devices."""
