"""What is told of the work while it is done: a record of each request and step, logs and traces made of them."""
