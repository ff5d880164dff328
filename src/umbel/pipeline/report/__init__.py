"""One page that tells what the cluster did: no network, no script, nothing to install.

| module   | what it does                                                        |
| -------- | ------------------------------------------------------------------- |
| facts    | asks the tables; every answer is bounded                            |
| shapes   | scales, axes and pieces of SVG; makes the texts of others harmless  |
| charts   | throughput, percentiles, lanes of workers                           |
| pieces   | headings, tables and marks                                          |
| listings | the parts of the page that are tables                               |
| sections | the summary, the plots, and all parts in their order                |
| page     | puts them together and writes the file at once                      |
| style    | how it looks, in the light and in the dark                          |

A table or a column that is not there costs a part of the page, not the page.
"""
