"""The comparison of the variants as rows, tables, figures and pages. Nothing here trains or measures."""
